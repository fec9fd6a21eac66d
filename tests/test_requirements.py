"""Which Triton the requirements choose. Whether all of them resolve on a CUDA machine is asked of the package index:

    uv pip compile requirements.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 --only-binary :all:
    uv pip compile requirements.txt --python-version 3.11 --python-platform x86_64-pc-windows-msvc --only-binary :all:

It reads metadata alone, and must end with torch 2.13.0 beside triton 3.7.1, or triton-windows 3.7.1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TORCH, ITS_TRITON = "2.13.0", "3.7.1"
"""torch's CUDA build of that version has the requirement triton==3.7.1."""


def chosen(name: str, system: str) -> dict[str, Requirement]:
    """The requirements of a file by package, as far as they concern a system."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    here = {"platform_system": system, "python_version": "3.11", "platform_machine": "x86_64"}
    return {one.name: one for one in found if one.marker is None or one.marker.evaluate(here)}


@pytest.mark.parametrize(("system", "triton"), [("Linux", "triton"), ("Windows", "triton-windows"), ("Darwin", None)])
def test_triton_is_the_one_that_torchs_cuda_build_has(system: str, triton: str | None) -> None:
    """On Windows 3.8 was chosen, which is for the next torch."""
    found = chosen("requirements.txt", system)
    assert found["torch"].specifier.contains(TORCH)
    assert [name for name in found if name.startswith("triton")] == ([triton] if triton else [])
    if triton is not None:
        assert found[triton].specifier.contains(ITS_TRITON)
    if system == "Windows":  # where torch pins none
        assert found["triton-windows"].specifier.contains("3.7.1.post27")
        assert not found["triton-windows"].specifier.contains("3.8.0.post29")


def test_kernels_are_tested_with_that_triton() -> None:
    assert str(chosen("requirements-dev.txt", "Linux")["triton"].specifier) == f"=={ITS_TRITON}"
