"""Compile every kernel's cases for the cards named by compute capability, and print one line of JSON.

    python -m tests.kernels.build_kernels 75 86           # all kernel files
    python -m tests.kernels.build_kernels 86 --only swiglu
    python -m tests.kernels.build_kernels --write         # renew kernels/gpu/resources.json

The JSON maps "kernel file/case/kernel function/arch" to `Resources`, with what the case asks for. A function that a
case compiles in several variants gets a number behind its name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.compiler.compiler import CompiledKernel

    from tests.support.compile_only import CompileCase

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "gpu"
TABLE = KERNELS / "resources.json"


def kernel_files() -> list[str]:
    """Files of kernels/gpu that register an op; the others hold what kernels share."""
    return sorted(path.stem for path in KERNELS.glob("*.py") if _registers(path))


def _registers(path: Path) -> bool:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any("register" in (getattr(call.func, "id", ""), getattr(call.func, "attr", "")) for call in calls)


def case_files() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / "compile_cases").glob("*.py"))


def build(archs: list[int], files: list[str]) -> dict[str, dict[str, Any]]:
    """Compile the cases of `files` for each arch."""
    from tests.support.machine_code import inspect_kernels

    found: dict[str, dict[str, Any]] = {}
    for arch in archs:
        launched = [
            (f"{file}/{case.name}", case, kernel)
            for file in files
            for case in importlib.import_module(f"tests.kernels.compile_cases.{file}").cases(arch)
            for kernel in compiled(file, case, arch)
        ]
        launches: Counter[str] = Counter()
        resources = inspect_kernels([kernel for _, _, kernel in launched], arch)
        for (place, case, _), seen in zip(launched, resources, strict=True):
            name = f"{place}/{seen.kernel}"
            launches[name] += 1
            again = f" ({launches[name]})" if launches[name] > 1 else ""
            asked = {"max_regs": case.max_regs, "max_shared": case.max_shared, "case_wide_loads": case.wide_loads}
            asked["case_policies"] = case.policies
            found[f"{name}{again}/{arch}"] = dataclasses.asdict(seen) | asked
    return found


def compiled(file: str, case: CompileCase, arch: int) -> list[CompiledKernel]:
    """The kernels that the launcher of `case` would start on a card of `arch`."""
    from tests.support.compile_only import CompileOnlyDriver

    try:
        with CompileOnlyDriver(arch) as driver:
            case.run()
    except Exception as error:
        raise RuntimeError(f"{file}/{case.name} does not compile for sm_{arch}") from error
    return driver.built


def table(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What of the results is kept in the repository."""
    return {
        key: {"registers": row["registers"], "shared": row["shared"], "wide_loads": row["loads"].get(128, 0)}
        for key, row in sorted(found.items())
    }


def _write(found: dict[str, dict[str, Any]], files: list[str]) -> None:
    """Renew the rows of `files`; a row is a line, so that changes can be read."""
    old = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows = {key: row for key, row in old.items() if key.split("/")[0] in set(case_files()) - set(files)} | table(found)
    lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    from tests.support.compile_only import ARCHS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", type=int, help=f"compute capabilities, by default {ARCHS}")
    parser.add_argument("--only", action="append", choices=case_files(), help="a kernel file; may be repeated")
    parser.add_argument("--write", action="store_true", help="renew kernels/gpu/resources.json (all cards)")
    args = parser.parse_args()
    files = args.only or case_files()
    found = build(list(ARCHS) if args.write or not args.archs else args.archs, files)
    if args.write:
        _write(found, files)
    print(json.dumps(found))


if __name__ == "__main__":
    # Must be settled before Triton is imported. 3.9 warns where the second is unset: its default is to change.
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    main()
