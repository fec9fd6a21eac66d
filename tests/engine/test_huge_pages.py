"""The cache's memory is asked for in huge pages, where the system has them to give."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from engine.memory import huge_pages
from engine.memory.huge_pages import HUGE, ask_for_huge_pages

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not MODE.exists() or "[madvise]" not in MODE.read_text(), reason="huge pages are not for the asking"
)
def test_whole_pages_of_a_tensor_are_asked_for_and_nothing_else():
    # With pages of ours on both sides: the system tells of neighbours that are asked for, too, as one mapping.
    with mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        around = torch.frombuffer(pages, dtype=torch.uint8)
        start = -(-(around.data_ptr() + 1) // HUGE) * HUGE
        offset = start + HUGE - 4096 - around.data_ptr()
        ask_for_huge_pages(around[offset : offset + 5 * HUGE])
        text = Path("/proc/self/smaps").read_text()
        flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)*?VmFlags:(.*)$", text, re.M)
        asked = [(int(a, 16), int(b, 16)) for a, b, own in flags if "hg" in own.split()]
        first, last = around.data_ptr(), around.data_ptr() + around.nbytes
        assert [one for one in asked if one[0] < last and first < one[1]] == [(start + HUGE, start + 5 * HUGE)]
        del around


@pytest.mark.parametrize("size", [0, 100, HUGE])
def test_what_holds_no_whole_huge_page_is_not_asked_for(size, monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda start, length, _: asked.append((start, length)))
    tensor = torch.empty(3 * HUGE, dtype=torch.uint8)
    offset = -tensor.data_ptr() % HUGE + 4096
    ask_for_huge_pages(tensor[offset : offset + size])
    assert asked == []
    ask_for_huge_pages(tensor[offset - 4096 : offset - 4096 + HUGE])
    assert asked == [(tensor.data_ptr() + offset - 4096, HUGE)]
