"""What two libraries do while they are imported that is of no use here, left out: a quarter of a start.

Gradio parses the source of each of its components and writes stubs for editors beside it. transformers reads the source
of all its models for the names in them, and does so twice because its cache is too small for them. Where a later
version has no such function, nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def install() -> None:
    """For imports from now on; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _write_no_stubs(module: ModuleType) -> None:
    if hasattr(module, "create_or_modify_pyi"):
        module.create_or_modify_pyi = lambda *_: None  # type: ignore[attr-defined]


def _read_once(module: ModuleType) -> None:
    found = getattr(module, "create_import_structure_from_path", None)
    if hasattr(found, "__wrapped__"):
        module.create_import_structure_from_path = cache(found.__wrapped__)  # type: ignore[attr-defined]


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "gradio.component_meta": _write_no_stubs,
    "transformers.utils.import_utils": _read_once,
}


class _Finder(MetaPathFinder):
    """Finds these modules as they are found anyway, and changes each once its code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _CHANGES.get(fullname)
        spec = None if change is None else PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if change is None or loader is None:
            return spec
        run = loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        loader.exec_module = run_and_change
        return spec
