"""What the assembler made of compiled kernels: registers and stack, and the loads in their code.

Only for processes that don't interpret (`TRITON_INTERPRET=0`).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

from triton import knobs
from triton.compiler.compiler import CompiledKernel

INSTRUCTION_BYTES = 16
_LOAD = re.compile(r"\bLDG(?:STS)?\.E((?:\.\w+)*)")
# In PTX; before compute capability 8.0 there is a hint for L1 alone.
_POLICY = re.compile(r"createpolicy\.fractional\.(L2::evict_\w+?)\.b64|ld\.global\.(L1::evict_\w+)\.(?!L2::cache_hint)")
_HINTED = re.compile(r"ld\.global\.L1::evict_\w+\.L2::cache_hint")
_LOCAL = re.compile(r"\b(?:STL|LDL)\b")
_DOT = re.compile(r"\b(?:HMMA|IMMA|QMMA|HGMMA)\b")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes. `loads` counts the global loads in its code by width in bits, `policies` those
    that carry a cache policy by its name, e.g. "L2::evict_last"."""

    kernel: str
    registers: int
    num_warps: int
    stack: int
    local_accesses: int
    shared: int
    loads: dict[int, int]
    policies: dict[str, int]
    hmma: int


def inspect_kernels(kernels: list[CompiledKernel], arch: int) -> list[Resources]:
    """Read each kernel's registers and stack from its cubin and its loads from its disassembly. All are of `arch`.

    They are disassembled together: the disassembler takes longer to start than to read a kernel.
    """
    return [_resources(kernel, code) for kernel, code in zip(kernels, _disassembled(kernels, arch), strict=True)]


def _resources(kernel: CompiledKernel, code: str) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Resources(
        kernel=kernel.metadata.name,
        registers=int(found[1]),
        num_warps=kernel.metadata.num_warps,
        stack=int(found[2]),
        local_accesses=len(_LOCAL.findall(code)),
        shared=kernel.metadata.shared,
        loads=dict(sorted(Counter(map(_load_bits, _LOAD.findall(code))).items())),
        policies=policies(kernel.asm["ptx"]),
        hmma=len(_DOT.findall(code)),
    )


def policies(ptx: str) -> dict[str, int]:
    """Loads by cache policy: each that goes by one of L2 makes its own."""
    found = Counter(l2 or l1 for l2, l1 in _POLICY.findall(ptx))
    assert sum(count for name, count in found.items() if name.startswith("L2")) == len(_HINTED.findall(ptx))
    return dict(sorted(found.items()))


def _disassembled(kernels: list[CompiledKernel], arch: int) -> list[str]:
    """The instructions of each kernel, a line each: the disassembler sees one after the other as one program."""
    programs = [_instructions(kernel.asm["cubin"]) for kernel in kernels]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(programs))
        file.flush()
        text = _output(knobs.nvidia.nvdisasm.path, "-b", f"SM{arch}{'a' if arch >= 90 else ''}", file.name)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*)", text)
    counts = [len(program) // INSTRUCTION_BYTES for program in programs]
    assert len(lines) == sum(counts), "an instruction is a line"
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return ["\n".join(lines[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _instructions(cubin: bytes) -> bytes:
    """The `.text` section of a cubin, an ELF file of 64 bits with one kernel in it."""
    [table] = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    # Of a section's header: offset of its name, offset and size of what it holds.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + index * entry_bytes) for index in range(count)]
    names = sections[names_index][1]
    [(_, start, size)] = [found for found in sections if cubin.startswith(b".text.", names + found[0])]
    return cubin[start : start + size]


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _load_bits(modifiers: str) -> int:
    """`.LTC128B` is a prefetch hint, not a width."""
    names = set(modifiers.split("."))
    for name, bits in (("128", 128), ("64", 64), ("U16", 16), ("S16", 16), ("U8", 8), ("S8", 8)):
        if name in names:
            return bits
    return 32
