"""Imports are quicker and give the same."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

from ui import quick_imports

ROOT = Path(__file__).parents[2]


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_gradio_writes_no_stubs():
    run(
        "import ast, sys\n"
        "from ui import quick_imports\n"
        "def refuse(*_): raise AssertionError('a source is parsed for its stub')\n"
        "ast.get_source_segment = refuse\n"
        "quick_imports.install()\n"
        "quick_imports.install()\n"
        "import gradio\n"
        "assert gradio.HTML(value='x').value == 'x'"
    )


def test_transformers_finds_the_same_names():
    run(
        "from pathlib import Path\n"
        "from ui import quick_imports\n"
        "quick_imports.install()\n"
        "import transformers.models\n"
        "from transformers.utils import import_utils as utils\n"
        "read = utils.create_import_structure_from_path\n"
        "assert read.cache_info().hits > 100\n"
        "models = str(Path(transformers.models.__file__).parent)\n"
        "cached = utils.spread_import_structure(read(models))\n"
        "read.cache_clear()\n"
        "assert cached == utils.spread_import_structure(read(models))\n"
        "assert any('llama.tokenization_llama' in part for part in cached.values())"
    )


def test_a_version_without_these_functions_stays_as_it_is():
    module = ModuleType("empty")
    names = dir(module)
    for change in quick_imports._CHANGES.values():
        change(module)
    assert dir(module) == names
