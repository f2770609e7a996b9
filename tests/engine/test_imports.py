"""What imports what: no circles, and a memory manager and a scheduler that need no torch."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    [
        "memory",
        "scheduling",
        "decoding.methods",
        "engine",
        "components",
        "metrics",
        "outputs",
        "config",
        "simulation",
        "simulation.run",
        "viewer.replay",
        "playground.simulated",
        "playground.pocket",
    ],
)
def test_module_loads_no_torch(module):
    """A top-level import that drags seconds of torch into a simulation, or NumPy into a browser."""
    heavy = {"torch", "transformers", "numpy"}
    code = f"import minipaged.{module}, sys; sys.exit(' '.join({heavy} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"minipaged.{module}: {done.stderr}"


def test_the_playground_needs_the_standard_library_alone():
    """A page that loads Pyodide has no pip: an import of rich there is an engine that does not start."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('rich', 'typer', 'numpy', 'torch', 'transformers')))\n"
        "import minipaged.playground.simulated, minipaged.playground.pocket"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_names_of_the_package_are_found_before_they_are_loaded():
    """Catches an interpreter that completes `minipaged.` to `sys` and `Path`, but not to `LLM`."""
    code = "import minipaged, sys; print(*dir(minipaged)); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"LLM", "SamplingParams", "__version__"} <= {*done.stdout.split()}
    assert "sys" not in done.stdout.split()


def test_a_clone_without_symbolic_links_finds_its_kernels(tmp_path):
    """On Windows git writes a link as a small text file: the package has no `kernels` folder to import."""
    without = shutil.ignore_patterns("kernels", "pocket_model", "__pycache__")
    shutil.copytree(ROOT / "minipaged", tmp_path / "minipaged", ignore=without)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    (tmp_path / "minipaged" / "kernels").write_text("../kernels")
    code = (
        "import importlib.util, minipaged.kernels, minipaged.kernels.metadata as metadata\n"
        "assert importlib.util.find_spec('minipaged.kernels.layout')\n"
        "print(minipaged.kernels is __import__('sys').modules['minipaged.kernels'], metadata.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", str(tmp_path / "kernels" / "metadata.py")]


def project_modules() -> dict[str, Path]:
    """Module name -> file, for the whole package."""
    found = {}
    for folder, package in ((ROOT / "minipaged", "minipaged"), (ROOT / "kernels", "minipaged.kernels")):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def imports_of(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The project's modules that a file imports: at the top, in functions, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} has a relative import; the rest of the project has none"
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", node.module)
                yield from [name for name in names if name in modules][:1]


def test_no_modules_import_each_other_in_a_circle():
    """Catches a circle that an import inside a function hides from Python, but not from a reader."""
    modules = project_modules()
    assert {"minipaged", "minipaged.kernels.layout", "minipaged.cli.main"} <= set(modules)
    graph = {name: {*imports_of(file, modules)} - {name} for name, file in modules.items()}
    assert sum(map(len, graph.values())) > 300, "the imports were not found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        pytest.fail(f"an import circle: {circle}")
