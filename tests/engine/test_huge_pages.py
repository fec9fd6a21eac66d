"""The cache's memory is asked for in huge pages, where the system has them to give."""

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
    tensor = torch.empty(5 * HUGE, dtype=torch.uint8)
    ask_for_huge_pages(tensor)
    start = -(-tensor.data_ptr() // HUGE) * HUGE
    flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)*?VmFlags:(.*)$", Path("/proc/self/smaps").read_text(), re.M)
    asked = {(int(a, 16), int(b, 16)) for a, b, own in flags if "hg" in own.split()}
    assert any(a <= start and start + 4 * HUGE <= b for a, b in asked)
    assert not any(a <= tensor.data_ptr() < start and a != start for a, b in asked if b > tensor.data_ptr())


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
