"""What every kernel becomes on each card it is meant for: compiled ahead of time, which needs no card."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from tests.kernels import build_kernels
from tests.support import codegen_child
from tests.support.compile_only import registers_for_two, shared_for_two

# Versions of the compiler differ in register allocation, so the table is a record within these bounds.
REGISTER_TOLERANCE = 24
SHARED_TOLERANCE = 2048
WIDE_LOAD_TOLERANCE = 2

TILED = {"paged_decode_kernel", "paged_prefill_kernel", "dequant_gemm_kernel"}
"""Kernels of matrix products."""

Rows = codegen_child.Rows


@pytest.fixture(scope="session")
def built() -> Rows:
    """Triton's own disk cache makes reruns quick."""
    return codegen_child.rows()


def test_every_kernel_file_has_cases(built: Rows) -> None:
    compiled = {key.split("/")[0] for key in built}
    assert compiled == set(build_kernels.kernel_files())


def test_no_kernel_spills(built: Rows) -> None:
    spilling = {key: row for key, row in built.items() if row["stack"] or row["local_accesses"]}
    assert not spilling


def test_two_programs_fit_an_sm(built: Rows) -> None:
    greedy = {}
    for key, row in built.items():
        arch = int(key.rsplit("/", 1)[1])
        registers = min(row["max_regs"], registers_for_two(row["num_warps"]))
        shared = min(row["max_shared"], shared_for_two(arch))
        if row["registers"] > registers or row["shared"] > shared:
            greedy[key] = (row["registers"], registers, row["shared"], shared)
    assert not greedy, "key: (registers, allowed, shared, allowed)"


def test_memory_is_read_128_bits_wide(built: Rows) -> None:
    wide: dict[tuple[str, str, str], int] = defaultdict(int)
    asked: dict[tuple[str, str, str], int] = {}
    for key, row in built.items():
        file, case, _, arch = key.split("/")
        wide[file, case, arch] += row["loads"].get("128", 0)
        asked[file, case, arch] = row["case_wide_loads"]
    narrow = {key: (count, asked[key]) for key, count in wide.items() if count < asked[key]}
    assert not narrow, "key: (128-bit loads, at least)"


def test_tensor_cores_multiply_where_a_card_has_what_triton_needs(built: Rows) -> None:
    """On 7.5 a `tl.dot` would become scalar multiplications; decoding there has none."""
    tiled = {key: row for key, row in built.items() if row["kernel"] in TILED}
    assert {row["kernel"] for row in tiled.values()} == TILED
    assert not {key: row["hmma"] for key, row in tiled.items() if (row["hmma"] > 0) != (int(key.split("/")[-1]) >= 80)}


def test_loads_carry_the_cache_policies_that_cards_have(built: Rows) -> None:
    """The interpreter ignores them, and a compiler may drop them, as it does for copies ahead of use."""
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    asked: dict[tuple[str, str, str], set[str]] = {}
    for key, row in built.items():
        file, case, _, arch = key.split("/")
        found[file, case, arch] |= row["policies"].keys()
        level = "L2" if int(arch) >= 80 else "L1"
        asked[file, case, arch] = {f"{level}::{policy}" for policy in row["case_policies"]}
    assert sum(len(policies) for policies in asked.values()) > 20
    assert not {key: (found[key], policies) for key, policies in asked.items() if not policies <= found[key]}


def test_the_table_of_resources_is_current(built: Rows) -> None:
    found = {key: row | {"wide_loads": row["loads"].get("128", 0)} for key, row in built.items()}
    kept = json.loads(build_kernels.TABLE.read_text())
    renew = "renew it: python -m tests.kernels.build_kernels --write"
    assert kept.keys() == found.keys(), renew
    bounds = {"registers": REGISTER_TOLERANCE, "shared": SHARED_TOLERANCE, "wide_loads": WIDE_LOAD_TOLERANCE}
    stale = {
        f"{key} {name}": (row[name], found[key][name])
        for key, row in kept.items()
        for name, bound in bounds.items()
        if abs(row[name] - found[key][name]) > bound
    }
    assert not stale, renew
