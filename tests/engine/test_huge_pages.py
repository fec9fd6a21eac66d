"""The cache's memory is asked for in huge pages, where the system has them to give."""

import re
from pathlib import Path

import pytest
import torch

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
def test_small_tensors_are_left_as_they_are(size):
    ask_for_huge_pages(torch.empty(size, dtype=torch.uint8))
