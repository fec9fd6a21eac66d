"""Which memory an object of ours holds in tensors and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.memory.process import Range

OURS = ("engine.", "kernels.", "tests.")


def held_ranges(*roots: Any) -> list[Range]:
    """Address and bytes of each tensor and array on the host that is reached from `roots` through objects of this
    project, lists, tuples and dicts; each storage once. Views of a mapped file are the file's, not the holder's."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device.type == "cpu" and item.layout is torch.strided:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, np.ndarray):
            if item.base is not None:
                waiting.append(item.base)
            else:
                found[item.ctypes.data] = item.nbytes
        else:
            waiting += _parts(item)
    found.pop(0, None)
    return sorted(found.items())


def _parts(item: Any) -> list[Any]:
    if isinstance(item, list | tuple):
        return [] if item and isinstance(item[0], int) else list(item)
    if isinstance(item, dict):
        return list(item.values())
    kind = type(item)
    if not kind.__module__.startswith(OURS):
        return []
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    own = [getattr(item, name) for name in slots if name != "__dict__" and hasattr(item, name)]
    return own + list(getattr(item, "__dict__", {}).values())
