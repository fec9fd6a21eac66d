"""What compiled CPU kernels are given: int64 words at an address, these are their indices.

With arrays and tuples numba takes more than a minute to compile the kernels; with addresses and numbers, seconds.
"""

from __future__ import annotations

TASK_WEIGHTS = 32768  # weights that one task of a product takes, about
SPLIT = 128  # cached positions that one task of attention takes
SYNC_BYTES = 128  # of a phase: ticket and count of done tasks, each in a cache line of its own
PHASES = 8  # of a layer
UNPACKED_ROWS = 16  # of the cache that are unpacked at a time, behind SCORES

# A matrix: its blocks, their format, bytes and blocks of a row, rows, float32 bias (0: none), float32 factor, and the
# address of the kernel that multiplies its rows.
ADDRESS, FORMAT, ROW_BYTES, BLOCKS, ROWS, BIAS, FACTOR, DOT, MATRIX_WORDS = range(9)

# A layer: seven matrices, then the float32 weights of its norms (0: queries and keys are not normed).
Q, K, V, O, GATE, UP, DOWN, MATRICES = range(8)  # noqa: E741
ATTN_NORM, MLP_NORM, Q_NORM, K_NORM = range(MATRICES * MATRIX_WORDS, MATRICES * MATRIX_WORDS + 4)
LAYER_WORDS = K_NORM + 1

# A model. Padded sizes are the next multiple of 32; EPS, ROPE_SCALE and what scores are
# multiplied by lie as float32 at SCALARS.
(LAYERS, LAYER_RECORDS, HIDDEN, HIDDEN_PADDED, INNER_PADDED, HEADS, KV_HEADS, DIM, HEADS_PADDED) = range(9)
(SCALARS, INV_FREQ, NORM, FUNCTIONS, MODEL_WORDS) = range(9, 14)

# FUNCTIONS: addresses of the kernels that others call.
BLOCK_SUMS, NORMALISE, PRODUCT, GATED, STORE, ATTENTION, ATTEND, COMBINE, FUNCTION_WORDS = range(9)

# A step. TOKENS tokens in TILED rows of float32 buffers: X [TILED, hidden padded] the residual stream, QKV, PARTS
# [TILED, heads, splits, dim + 2] (values, largest score, sum of weights), ACT [TILED, inner padded], OUT like X.
# SCRATCH of a thread: NORMED [TILED, widest input], SUMS of its blocks, DOTS, SCORES, ANGLES at these float offsets.
# SINK_Q [TILED, heads, dim]: the queries as sinks beyond the window are scored.
(MODEL, TOKENS, TILED, X, QKV, QKV_WIDTH, PARTS, SPLITS, ACT, OUT) = range(10)
(SCRATCH, SCRATCH_BYTES, SUMS, DOTS, SCORES, ANGLES) = range(10, 16)
# int64 [TOKENS] positions and rows of the block tables; records of the groups of layers and of each layer's place.
(SINK_Q, POSITIONS, SEQUENCES, GROUPS, GROUP_COUNT, PLACES) = range(16, 22)
# The cache: int64 addresses of extents, blocks [STORES, 2, block size, KV heads, HEAD_BYTES] in each, and of extents of
# their scales, [STORES, SCALE_PLANES, block size, KV heads, SCALE_BYTES]; float32 BALANCE [layers, KV heads, dim] or 0.
(EXTENTS, EXTENT_BLOCKS, STORES, BLOCK_SIZE, KV_KIND, HEAD_BYTES) = range(22, 28)
(SCALE_EXTENTS, SCALE_PLANES, SCALE_BYTES, BALANCE, STEP_WORDS) = range(28, 33)

# A group of layers: int64 [TOKENS] slots, int32 tables [sequences, TABLE_WIDTH], what its queries see.
SLOTS, TABLES, TABLE_WIDTH, WINDOW, SINKS, GROUP_WORDS = range(6)
NO_WINDOW = 2**62

# A layer's place: its group, the index in the group's blocks, and the layer that stores there.
GROUP, STORE_INDEX, OWNER, PLACE_WORDS = range(4)


def padded(columns: int) -> int:
    return -(-columns // 32) * 32


def task_rows(columns: int) -> int:
    return max(1, TASK_WEIGHTS // padded(columns))
