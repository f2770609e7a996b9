"""What the lessons in the browser load: an editor, the lessons' tests, and the pytest that runs them.

The editor is CodeMirror, fetched by npm in pinned versions, bundled, and kept in the user's cache directory.
pytest is the one that is installed here. Where either cannot be had, the site is built all the same, and the
lessons say what is missing.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from minipaged.learn.lessons import Lesson, read_lessons
from minipaged.playground.lessons import DEMOS

EDITOR = Path(__file__).parent / "editor"
LICENCE = "/*! CodeMirror, https://codemirror.net, MIT licence, (c) Marijn Haverbeke and others */"
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging")
LOADED = "import sys, pytest; print(*(n for n in sys.modules if n == 'py' or n.startswith('pygments')))"


def write_lessons(root: Path, folder: Path, cache: Path) -> str | None:
    """Write editor.js, lessons.zip and each exercise as it ships into `folder`; None, or what is missing."""
    lessons = [lesson for lesson in read_lessons(root) if lesson.number in DEMOS]
    for lesson in lessons:
        shutil.copy(lesson.start, folder / f"{lesson.folder.name}.txt")
    if find_spec("pytest") is None:
        return "pytest is not installed"
    write_tests(root, lessons, folder / "lessons.zip")
    return write_editor(folder / "editor.js", cache)


def write_tests(root: Path, lessons: list[Lesson], target: Path) -> None:
    """The lessons' tests, what these import of tests/, their tasks, and pytest; the same bytes each time."""
    files = {f"tests/{name}.py" for name in ("__init__", "plain", "trials", "overrides")}
    waiting = {test.partition("::")[0] for lesson in lessons for test in lesson.tests}
    while waiting:
        file = waiting.pop()
        files.add(file)
        waiting |= helpers(root, file) - files
    for lesson in lessons:
        files |= {str(file.relative_to(root)) for file in (lesson.start, lesson.folder / "tasks.toml")}
    contents = {name: (root / name).read_bytes() for name in files}
    for package in PACKAGES:
        place = Path(str(find_spec(package).origin)).parent  # type: ignore[union-attr]
        for path in place.rglob("*.py"):
            contents[f"{package}/{path.relative_to(place).as_posix()}"] = path.read_bytes()
    contents |= loaded_by_pytest()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED, compresslevel=9)


def helpers(root: Path, file: str) -> set[str]:
    """The modules of tests/ that a test file imports, when it is loaded or later."""
    found = set()
    for node in ast.walk(ast.parse((root / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            place = str(node.module).replace(".", "/")
            found |= {f"{place}.py", *(f"{place}/{imported.name}.py" for imported in node.names)}
    return {name for name in found if (root / name).exists()}


def loaded_by_pytest() -> dict[str, bytes]:
    """Of pygments the few modules that pytest loads, and the module `py`, which is its own."""
    names = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    found = {}
    for name in names.split():
        origin = Path(str(find_spec(name).origin))  # type: ignore[union-attr]
        path = name.replace(".", "/") + ("/__init__.py" if origin.name == "__init__.py" else ".py")
        found[path] = origin.read_bytes()
    return found


def write_editor(target: Path, cache: Path) -> str | None:
    """Bundle the editor; None, or why there is none."""
    sources = [EDITOR / name for name in ("package.json", "editor.js")]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    kept = cache / f"editor-{digest}.js"
    if not kept.exists():
        if shutil.which("npm") is None:
            return "npm, which fetches the editor, is not installed"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            for source in sources:
                shutil.copy(source, scratch)
            install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
            bundle = ["node_modules/.bin/esbuild", "editor.js", "--bundle", "--format=esm", "--minify"]
            try:
                for command in (install, [*bundle, "--outfile=bundled.js"]):
                    subprocess.run(command, cwd=scratch, capture_output=True, check=True, timeout=120)
            except (OSError, subprocess.SubprocessError):
                packages = json.loads(sources[0].read_text())["dependencies"]
                return f"npm cannot fetch {', '.join(f'{name}@{at}' for name, at in packages.items())}"
            bundled = Path(scratch, "bundled.js")
            bundled.write_text(f"{LICENCE}\n{bundled.read_text()}")
            bundled.replace(kept)
    shutil.copy(kept, target)
    return None
