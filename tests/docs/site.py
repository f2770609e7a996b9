"""The built site, for the tests that look at it: built once a test run, whatever the number of processes."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_once(factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly, unless another process of this test run has done it; where it lies."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip('mkdocs is not installed; pip install -c constraints.txt -e ".[docs]"')
    fcntl = pytest.importorskip("fcntl", reason="the test run's processes take turns by a POSIX lock")
    own = factory.getbasetemp()  # of this process; its parent is the test run's if there are several
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "minipaged-site"
    folder.mkdir(exist_ok=True)
    site = folder / "site"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run("docs/_generate/build.py")
            run("-m", "mkdocs", "build", "--strict", "--site-dir", str(site))
            (folder / "done").touch()
    return site


def run(*arguments: str) -> str:
    """Run Python in the repository; its output. A failure shows what it printed."""
    # With the address of a repository, as the published site has it: themes ask its host for its fame.
    address = {"MINIPAGED_REPO_URL": "https://github.com/example/minipaged"}
    environment = {**os.environ, **address, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; the address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
