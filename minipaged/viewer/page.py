"""The viewer as one HTML file: style, script and trace inside, nothing loaded from anywhere.

    trace_page(path) -> HTML      a recorded run (`minipaged view TRACE -o PAGE.html`)
    live_page() -> HTML           for a server: a prompt box beside the pool, fed by its /trace/live

The script is the concatenated ES modules of `viewer/web/`; a content security policy allows no other script.
The trace is data: compressed, in base64, and read by the script as text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections import deque
from pathlib import Path

from minipaged.text_io import read_text
from minipaged.viewer.replay import TraceError, read_trace

WEB = Path(__file__).with_name("web")
IMPORT = re.compile(r'^import .*? from "\./(\w+\.js)";\n', re.MULTILINE)


def script(entry: str) -> str:
    """A module of `web/` and all that it imports, as one script: a module's names are unique among them."""
    placed: list[str] = []

    def place(name: str, above: tuple[str, ...]) -> None:
        text = (WEB / name).read_text(encoding="utf-8")
        for needed in IMPORT.findall(text):
            assert needed not in above, f"{needed} and {name} import each other"
            if needed not in placed:
                place(needed, (*above, name))
        placed.append(name)

    place(entry, ())
    texts = (IMPORT.sub("", (WEB / name).read_text(encoding="utf-8")) for name in placed)
    return re.sub(r"^export (?=\w)", "", "\n".join(texts), flags=re.MULTILINE)


def page(template: str, title: str, data: str = "", connects: bool = False) -> str:
    """A template of `web/`, NAME.html with its NAME.js, filled.

    Args:
        title: of the page, any text.
        data: base64.
        connects: whether the page may talk to the server that it came from.
    """
    code = f"\n{script(template + '.js')}\n"
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    if connects:
        policy += "; connect-src 'self'"
    parts = {
        "policy": policy + "; base-uri 'none'; form-action 'none'",
        "title": html.escape(title),
        "style": "".join((WEB / f"{name}.css").read_text(encoding="utf-8") for name in ("viewer", "page")),
        "data": data,
        "script": code,
    }
    text = (WEB / f"{template}.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], text)


def trace_page(path: Path) -> str:
    """A recorded run as a page. Raises `TraceError` if the file does not begin like a trace, `TextError`
    if it is too large. A trace that breaks off later is shown up to there, and the page says why."""
    read_trace(path)  # checks the header
    text = read_text("trace", path)
    data = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return page("trace", path.name, data)


def breaks_off(path: Path) -> str | None:
    """Why a trace cannot be read to its end, in a sentence; None if it can."""
    try:
        deque(read_trace(path), maxlen=0)
    except TraceError as error:
        return f"{error} (the page shows the steps before it)"
    return None


def live_page() -> str:
    """The page of a server: POST /v1/completions of its own origin, and its steps from GET /trace/live.

    That is a stream of server-sent events, each with one line of a trace as its data: first a header, then
    the memory as it is in an entry of its own, then an entry for each step.
    """
    return page("live", "minipaged, live", connects=True)
