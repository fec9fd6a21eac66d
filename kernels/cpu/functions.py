"""The kernels that others call by address."""

from __future__ import annotations

import numpy as np

from kernels.cpu import records as rec
from kernels.cpu.activations import norm, normed, quantise_row
from kernels.cpu.attention import accumulate_rows, attend, attention, combined, score_rows
from kernels.cpu.product import gated, product
from kernels.cpu.store import store
from kernels.cpu.tile_attention import add_values, attend_tile, score_tile

FUNCTIONS = np.zeros(rec.FUNCTION_WORDS, np.int64)
"""What `rec.FUNCTIONS` points to."""
FUNCTIONS[rec.QUANTISE_ROW] = quantise_row.address
FUNCTIONS[rec.NORM_ROW] = norm.address
FUNCTIONS[rec.NORMED] = normed.address
FUNCTIONS[rec.PRODUCT] = product.address
FUNCTIONS[rec.GATED] = gated.address
FUNCTIONS[rec.STORE] = store.address
FUNCTIONS[rec.ATTENTION] = attention.address
FUNCTIONS[rec.ATTEND] = attend.address
FUNCTIONS[rec.ATTEND_TILE] = attend_tile.address
FUNCTIONS[rec.SCORE] = score_rows.address
FUNCTIONS[rec.ACCUMULATE] = accumulate_rows.address
FUNCTIONS[rec.COMBINED_ROWS] = combined.address
FUNCTIONS[rec.SCORE_TILE] = score_tile.address
FUNCTIONS[rec.ADD_VALUES] = add_values.address
