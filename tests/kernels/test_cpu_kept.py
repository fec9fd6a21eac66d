"""Compiling ahead: what the child processes leave behind, whole, killed or two at a time."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import kept
from kernels.dispatch import cpu_kernels

FOLDER = Path(kept.__file__).parent
needs_kernels = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")


def python(code: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@needs_kernels
def test_the_parts_compile_everything_and_need_no_torch():
    """A kernel that none of them imports would be compiled by the first chat, while its reader waits."""
    imports = "; ".join(f"from kernels.cpu import {modules}" for modules in kept.PARTS.values())
    loaded = python(f"{imports}; import sys; print(*sys.modules)", FOLDER.parents[1]).split()
    decorated = re.compile(r"^@(compiled|by_address)\(", re.MULTILINE)
    with_kernels = {f"kernels.cpu.{path.stem}" for path in FOLDER.glob("*.py") if decorated.search(path.read_text())}
    assert with_kernels and with_kernels <= set(loaded)
    assert "torch" not in loaded


BEGIN = "from kernels.cpu import kept; kept.compile_ahead(); kept.wait_for_children(); print(kept.is_complete())"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """`kernels.cpu` with nothing but `kept`, and modules that only note that they were imported."""
    cpu = tmp_path / "kernels" / "cpu"
    cpu.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py"):
        (cpu / name).touch()
    shutil.copy(FOLDER / "kept.py", cpu)
    for modules in kept.PARTS.values():
        for module in modules.split(", "):
            (cpu / f"{module}.py").write_text(f"open('log', 'a').write('{module} ')")
    return tmp_path


def test_what_is_complete_is_not_begun_again(copy):
    assert python(BEGIN, copy) == "True"
    log = (copy / "log").read_text()
    assert sorted(log.split()) == sorted(", ".join(kept.PARTS.values()).split(", "))
    assert python(BEGIN, copy) == "True"
    assert (copy / "log").read_text() == log


def test_a_killed_part_is_begun_again_alone(copy):
    module = copy / "kernels" / "cpu" / "attention.py"
    # The sources stay the same, since their digest names the folder.
    module.write_text(
        "import os\nif not os.path.exists('log2'):\n open('log2', 'w')\n os._exit(1)\n" + module.read_text()
    )
    assert python(BEGIN, copy) == "False"
    (copy / "log").unlink()
    assert python(BEGIN, copy) == "True"
    assert (copy / "log").read_text() == "attention "


@needs_kernels
def test_two_that_compile_the_same_at_once_leave_it_whole(tmp_path):
    copied = tmp_path / "kernels"
    copied.mkdir()
    (copied / "__init__.py").touch()
    shutil.copytree(FOLDER, copied / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    load = (
        "from kernels.cpu import tickets\n"
        "found = [tickets.draw, tickets.finish, tickets.finished, tickets.wait]\n"
        "print(sum(sum(one.stats.cache_hits.values()) for one in found))"
    )
    both = [subprocess.Popen([sys.executable, "-c", load], cwd=tmp_path, stdout=subprocess.PIPE) for _ in range(2)]
    for one in both:
        one.communicate()
        assert one.returncode == 0
    assert python(load, tmp_path) == "4"
