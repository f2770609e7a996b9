"""What the pages of docs/play load: the engine as a zip file, Pyodide, the pocket model, the lessons.

Pyodide (WebAssembly, 14 MB) comes from npm in the pinned version and is kept in the user's cache directory,
with the modules that Python starts with compiled (compiled_stdlib.mjs). Where it cannot be had, the site is
built all the same, and those pages say what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from lesson_files import write_lessons

PYODIDE = "314.0.7"
PYODIDE_FILES = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
COMPILER = Path(__file__).parent / "compiled_stdlib.mjs"
LEFT_OUT = (
    "cli",
    "kernels",
    "pocket_model",
    "serving",
    "bench.py",
    "workload.py",
    "llm.py",
    "async_llm.py",
    "engine_thread.py",
    "__main__.py",
)


def write_play(root: Path, folder: Path) -> None:
    """Fill `folder` (docs/play) from the repository at `root`; manifest.json says what is missing."""
    for name in ("engine", "pyodide", "weights", "lessons"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_engine(root / "minipaged", folder / "engine" / "minipaged.zip")
    checkpoint = root / "minipaged/pocket_model/checkpoint"
    (folder / "weights").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(checkpoint / name, folder / "weights" / name)
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "minipaged"
    missing = write_pyodide(folder / "pyodide", cache)
    if missing:
        print(f"the playground stays empty: {missing}")
    (folder / "lessons").mkdir()
    missing_lessons = write_lessons(root, folder / "lessons", cache)
    if missing_lessons:
        print(f"the lessons have no editor: {missing_lessons}")
    engine = folder / "engine/minipaged.zip"
    pyodide = [file for name in PYODIDE_FILES if (file := folder / "pyodide" / name).exists()]
    lessons = [*folder.glob("lessons/*.js"), *folder.glob("lessons/*.zip")]
    weights = [*folder.glob("weights/*")]

    def sizes(files: list[Path]) -> dict[str, int]:
        return {str(file.relative_to(folder)): file.stat().st_size for file in files}

    manifest = {
        "version": PYODIDE,
        "missing": missing,
        "files": sizes([engine, *pyodide]),
        "lessons": {"missing": missing or missing_lessons, "files": sizes(lessons)},
        "weights": sizes(weights),
        # Of what changes without a new version of Pyodide: the address under which a browser keeps it.
        "digests": {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            for file in (engine, *lessons, *weights)
        },
    }
    (folder / "engine/manifest.json").write_text(json.dumps(manifest, indent=1))


def write_engine(package: Path, target: Path) -> None:
    """The package without what needs torch, as a zip file; the same bytes for the same sources."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(package.rglob("*.py")):
            name = file.relative_to(package)
            needs_torch = name.parts[0] == "execution" and name.name not in ("__init__.py", "executor.py")
            if name.parts[0] not in LEFT_OUT and not needs_torch:
                entry = zipfile.ZipInfo(f"minipaged/{name.as_posix()}")
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


def write_pyodide(folder: Path, cache: Path) -> str | None:
    """Unpack Pyodide; None, or why there is none."""
    archive = cache / f"pyodide-{PYODIDE}.tgz"
    if not archive.exists():
        if shutil.which("npm") is None:
            return "npm, which fetches Pyodide, is not installed"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
            try:
                subprocess.run(command, cwd=scratch, capture_output=True, check=True, timeout=120)
            except (OSError, subprocess.SubprocessError):
                return f"npm cannot fetch pyodide@{PYODIDE}"
            (Path(scratch) / archive.name).replace(archive)
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as packed:
        for name in PYODIDE_FILES:
            source = packed.extractfile(f"package/{name}")
            assert source is not None
            (folder / name).write_bytes(source.read())
    return compile_stdlib(folder, cache)


def compile_stdlib(folder: Path, cache: Path) -> str | None:
    """Exchange python_stdlib.zip for what compiled_stdlib.mjs makes of it; None, or why it cannot be had."""
    digest = hashlib.sha256(COMPILER.read_bytes()).hexdigest()[:16]
    kept = cache / f"pyodide-{PYODIDE}-stdlib-{digest}.zip"
    if not kept.exists():
        if shutil.which("node") is None:
            return "node, which compiles Python's standard library, is not installed"
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, kept.name)
            command = ["node", str(COMPILER), str(folder), str(made)]
            try:
                subprocess.run(command, capture_output=True, check=True, timeout=120)
            except (OSError, subprocess.SubprocessError):
                return f"node {COMPILER.name} fails"
            made.replace(kept)
    shutil.copy(kept, folder / "python_stdlib.zip")
    return None
