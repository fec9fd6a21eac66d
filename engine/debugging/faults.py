"""Which fault explains wrong rows of K and V: pure tensor work on one layer, nothing of engine or sessions.

A kind is believed only if it tells what the wrong rows should hold: each explanation makes candidate rows out of the
right ones, and the one that comes closest to what is stored wins, if it comes close enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

KINDS = ("shift", "overwrite", "stale", "wrong_position", "swap_blocks", "scale", "nan")
MOST_ROWS = 256
"""Wrong rows of a fault that are looked at, evenly chosen; the place of a fault comes from all of them."""
CLOSE_SHARE = 0.8
"""Of the rows that an explanation must fit."""
SHRINKS_TO = 0.25
"""An explanation fits a row if it leaves at most this share of its error, or as much as is tolerated anyhow."""
SLACK = 1.5
"""Rows that were moved, turned or scaled were rounded once more."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Rows of one layer, float32 [2 (K, V), n, heads, head_dim]: as stored, and as computed anew.

    `errors` and `limits` [2, n] are relative errors and what is tolerated of them; `sizes` [2, n] what they are
    relative to. `inv_freq` [rotary_dim / 2] are the frequencies of RoPE, empty where keys aren't rotated.
    """

    stored: Tensor
    fresh: Tensor
    errors: Tensor
    limits: Tensor
    sizes: Tensor
    inv_freq: Tensor
    block_size: int

    def without_rows(self) -> Layer:
        """The errors alone, for layers that have no fault: rows are what takes memory."""
        return replace(self, stored=self.stored[:, :0].clone(), fresh=self.fresh[:, :0].clone())

    def residuals(self, rows: Tensor, candidate: Tensor) -> Tensor:
        """[n'] the larger of K's and V's relative error of the stored rows [n'] against candidate rows."""
        difference = (self.stored[:, rows] - candidate).flatten(2).norm(dim=-1)
        return (difference / self.sizes[:, rows]).amax(0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of one layer. `amount`: shift or rotation in positions, blocks between swapped ones, or the factor."""

    kind: str
    positions: tuple[int, ...]
    max_error: float
    amount: float | None = None


def relative_errors(stored: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Errors and sizes [2, n] of rows [2, n, heads, head_dim]; NaN where a row is not finite.

    A row's error is relative to its norm, or to half the median one: the values of the first tokens are often tiny.
    """
    norms = fresh.flatten(2).norm(dim=-1)
    sizes = norms.maximum(norms.median(dim=-1, keepdim=True).values / 2).clamp_min(1e-12)
    return (stored - fresh).flatten(2).norm(dim=-1) / sizes, sizes


def wrong_positions(layer: Layer) -> Tensor:
    """Positions whose K or V is further off than tolerated, or not finite."""
    return (~(layer.errors <= layer.limits)).any(0).nonzero().flatten()


def classify(layer: Layer, earlier: Sequence[Tensor] = ()) -> list[Finding]:
    """All faults of a layer. `earlier`: rows [2, m, heads, head_dim] of ids that stood there before an edit."""
    bad = wrong_positions(layer)
    if not len(bad):
        return []
    finite = layer.stored[:, bad].isfinite().flatten(2).all(-1).all(0)
    found = [_finding("nan", layer, group) for group in _groups(bad[~finite], layer.block_size)]
    bad = bad[finite]
    swapped = _swapped(layer, bad)
    for pair in swapped:
        bad = bad[~torch.isin(bad, pair)]
        distance = int(pair[-1] // layer.block_size - pair[0] // layer.block_size)
        found.append(replace(_finding("swap_blocks", layer, pair), amount=distance))
    found += [_explain(layer, group, earlier) for group in _groups(bad, layer.block_size)]
    return sorted(found, key=lambda finding: finding.positions[0])


def _explain(layer: Layer, rows: Tensor, earlier: Sequence[Tensor]) -> Finding:
    """The best explanation of adjacent wrong rows; "overwrite" where nothing fits."""
    sample = _evenly(rows)
    candidates: list[tuple[str, float | None, Tensor, Tensor]] = []
    for name, by, rebuilt in (_turned(layer, sample), _scaled(layer, sample), _shifted(layer, sample)):
        if rebuilt is not None:
            candidates.append((name, by, sample, rebuilt))
    for version in earlier:
        known = sample[sample < version.shape[1]]
        if len(known) >= CLOSE_SHARE * len(sample):
            candidates.append(("stale", None, known, version[:, known]))
    best: tuple[str, float | None, float] = ("overwrite", None, float("inf"))
    for kind, amount, where, candidate in candidates:
        left = layer.residuals(where, candidate)
        tolerated = (SLACK * layer.limits[:, where].amax(0)).maximum(SHRINKS_TO * layer.errors[:, where].amax(0))
        if (left <= tolerated).float().mean() >= CLOSE_SHARE and float(left.mean()) < best[2]:
            best = (kind, amount, float(left.mean()))
    return replace(_finding(best[0], layer, rows), amount=best[1])


def _turned(layer: Layer, rows: Tensor) -> tuple[str, float, Tensor | None]:
    """Keys rotated for another position: the number of positions that turns the right ones into the stored ones.

    RoPE turns pair i of a head by position * inv_freq[i], so a pair's product with its right value, conjugated, has
    the angle between them. The sum over rows and heads, tried at every whole offset, is largest at the true one.
    """
    half = len(layer.inv_freq)
    if not half:
        return "wrong_position", 0, None
    stored, fresh = (_pairs(x[0, rows], half) for x in (layer.stored, layer.fresh))
    products = (stored * fresh.conj()).sum((0, 1))
    reach = layer.stored.shape[1]
    offsets = torch.arange(-reach, reach + 1)
    back = torch.polar(torch.ones(1), -offsets[:, None].float() * layer.inv_freq)
    offset = int(offsets[(back * products).real.sum(-1).argmax()])
    if not offset:
        return "wrong_position", 0, None
    return "wrong_position", offset, torch.stack((rotate(layer.fresh[0, rows], layer.inv_freq, offset),
                                                  layer.fresh[1, rows]))  # fmt: skip


def rotate(keys: Tensor, inv_freq: Tensor, positions: int) -> Tensor:
    """Keys [n, heads, head_dim] turned by so many positions more; the channels behind the rotated ones stay."""
    half = len(inv_freq)
    turned = _pairs(keys, half) * torch.polar(torch.ones(half), positions * inv_freq.float())
    return torch.cat((turned.real, turned.imag, keys[..., 2 * half :]), -1)


def _pairs(keys: Tensor, half: int) -> Tensor:
    """Complex [n, heads, half]: channel i and channel i + half are one pair."""
    return torch.complex(keys[..., :half].contiguous(), keys[..., half : 2 * half].contiguous())


def _scaled(layer: Layer, rows: Tensor) -> tuple[str, float, Tensor | None]:
    """K and V times a factor each, the one that fits best; the factor told is the one that is further from 1."""
    stored, fresh = layer.stored[:, rows].flatten(1), layer.fresh[:, rows].flatten(1)
    factors = (stored * fresh).sum(-1) / (fresh * fresh).sum(-1).clamp_min(1e-12)
    told = max(factors.tolist(), key=lambda factor: abs(factor - 1))
    return "scale", round(told, 4), factors[:, None, None, None] * layer.fresh[:, rows]


def _shifted(layer: Layer, rows: Tensor) -> tuple[str, float, Tensor | None]:
    """Rows of other positions, all the same distance away."""
    offset = Counter((rows - _nearest(layer, rows)).tolist()).most_common(1)[0][0]
    there = (rows - offset) % layer.fresh.shape[1]
    return "shift", offset, layer.fresh[:, there] if offset else None


def _swapped(layer: Layer, bad: Tensor) -> list[Tensor]:
    """Pairs of blocks that hold each other's rows; the wrong positions of each pair."""
    if len(bad) < 2:
        return []
    size, sample = layer.block_size, _evenly(bad)
    nearest = _nearest(layer, sample)
    close = layer.residuals(sample, layer.fresh[:, nearest]) <= SLACK * layer.limits[:, sample].amax(0)
    partner: dict[int, Counter[int]] = {}
    for here, there, fits in zip(sample.tolist(), nearest.tolist(), close.tolist(), strict=True):
        aligned = fits and here % size == there % size and here != there
        partner.setdefault(here // size, Counter())[there // size if aligned else -1] += 1
    best = {block: counts.most_common(1)[0] for block, counts in partner.items()}
    pairs = []
    for block, (other, votes) in best.items():
        mutual = other > block and other in best and best[other][0] == block
        if mutual and votes >= CLOSE_SHARE * partner[block].total():
            blocks = bad // size
            pairs.append(bad[(blocks == block) | (blocks == other)])
    return pairs


def _nearest(layer: Layer, rows: Tensor) -> Tensor:
    """For each of these positions, the one whose right row is nearest to what is stored there, K and V together."""
    scale = layer.sizes.median(dim=-1).values[:, None, None]

    def features(x: Tensor) -> Tensor:
        return (x.flatten(2) / scale).movedim(0, 1).flatten(1)

    return torch.cdist(features(layer.stored[:, rows]), features(layer.fresh)).argmin(1)


def _groups(positions: Tensor, reach: int) -> list[Tensor]:
    """Split where more than `reach` positions between two wrong ones are right."""
    if not len(positions):
        return []
    gaps = (positions.diff() > reach + 1).nonzero().flatten() + 1
    return list(positions.tensor_split(gaps))


def _evenly(rows: Tensor) -> Tensor:
    return rows if len(rows) <= MOST_ROWS else rows[torch.linspace(0, len(rows) - 1, MOST_ROWS).long()]


def _finding(kind: str, layer: Layer, rows: Tensor) -> Finding:
    errors = layer.errors[:, rows].amax(0)
    return Finding(kind, tuple(rows.tolist()), float("nan") if errors.isnan().any() else float(errors.max()))
