"""Who may import whom. The folders' borders are what keeps the code readable; this test is their guard."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "kernels", "sessions", "ui")
ALLOWED = {
    "sessions": {"sessions"},
    "kernels": {"kernels"},
    "engine": {"engine", "kernels"},
    "ui": {"ui", "engine", "sessions"},
}
CONTROL = (
    "engine/protocol.py",
    "engine/errors.py",
    "engine/config.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/prompt.py",
    "engine/memory/plan.py",
    "engine/sampling/params.py",
    "engine/sampling/beam.py",
    "engine/kv_cache/block_pool.py",
    "engine/kv_cache/prefix_cache.py",
    "engine/kv_cache/block_tables.py",
    "engine/kv_cache/window.py",
    "engine/kv_cache/layout.py",
    "engine/kv_cache/checkpoints.py",
    "engine/kv_cache/prefixes.py",
    "engine/kv_cache/sequence_state.py",
    "engine/kv_cache/integrity.py",
    "engine/kv_cache/compaction.py",
    "engine/debugging/protocol.py",
    "engine/debugging/records.py",
    "engine/debugging/timeline.py",
    "engine/debugging/trace_events.py",
    "engine/debugging/invariants.py",
)


def imported_modules(path: Path) -> set[str]:
    """Every absolute module name that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_lies_below_them(folder):
    assert sources(folder)
    for path in sources(folder):
        roots = {name.split(".")[0] for name in imported_modules(path)}
        assert not (roots & {*FOLDERS, "app", "tests", "benchmarks"}) - ALLOWED[folder], path


@pytest.mark.parametrize("path", CONTROL)
def test_control_imports_no_torch(path):
    """Also not by way of another module of ours."""
    seen: set[str] = set()
    todo = [path]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imported_modules(ROOT / current):
            assert name.split(".")[0] not in ("torch", "numpy", "transformers"), f"{current} imports {name}"
            module = name.replace(".", "/") + ".py"
            if name.split(".")[0] in FOLDERS and (ROOT / module).exists():
                todo.append(module)


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_app_reads_environment_and_arguments(folder):
    for path in sources(folder):
        text = path.read_text()
        if folder == "kernels" and path.name == "dispatch.py":
            continue
        assert "os.environ" not in text and "os.getenv" not in text and "sys.argv" not in text, path


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("conftest.py")), ids=lambda path: path.parent.name)
def test_what_lasts_for_a_package_is_in_one(path):
    """Else it lasts to the end of all tests: the browser did, and its event loop failed others that ran one."""
    keywords = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)]
    scopes = [ast.literal_eval(node.value) for node in keywords if node.arg == "scope"]
    assert "package" not in scopes or path.with_name("__init__.py").exists()
