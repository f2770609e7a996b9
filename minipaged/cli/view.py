"""`minipaged view`: a run in the browser, recorded or live. `minipaged top`: a server in the terminal."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

from rich.console import Console, RenderableType
from rich.live import Live
from typer import Argument, Option

from minipaged.cli.options import ApiKey
from minipaged.progress import restored_at_end
from minipaged.text_io import check_writable, without_controls, write_text
from minipaged.viewer.page import breaks_off, trace_page
from minipaged.viewer.perfetto import perfetto
from minipaged.viewer.replay import read_trace
from minipaged.viewer.scrape import Scrape, ServerError, dashboard, fetch, read_metrics, root_of


def view(
    trace: Annotated[Path | None, Argument(help="A trace, from generate --trace FILE.")] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write the page here. [default: TRACE.html]")
    ] = None,
    export: Annotated[
        Path | None, Option("--perfetto", help="Write the trace for ui.perfetto.dev here.")
    ] = None,
    live: Annotated[str | None, Option(help="Open the live page of the server at this URL.")] = None,
) -> None:
    """Show a run step by step: pool, block tables, queues, and why."""
    if live is not None:
        for name, given in (("a trace", trace), ("--output", output), ("--perfetto", export)):
            if given is not None:
                raise ValueError(f"--live {live} opens the server's own page, not {name}; drop one")
        address = _live_page(live)
        opened = webbrowser.open(address)
        print(f"{'opened' if opened else 'open this page in a browser:'} {address}")
        return
    if trace is None:
        raise ValueError("view needs a trace, or --live URL; make a trace with generate --trace FILE")
    read_trace(trace)  # a bad trace is reported before a bad output
    if output is None and export is None:
        output = trace.with_suffix(".html")
    for what, path in (("page", output), ("Perfetto trace", export)):
        check_writable(what, path, trace)
    if output is not None and export is not None and output.resolve() == export.resolve():
        raise ValueError(f"page and Perfetto trace are both {output}; give each its own file")
    if output is not None:
        text = trace_page(trace)
        if (problem := breaks_off(trace)) is not None:
            print(f"minipaged: {problem}", file=sys.stderr)
        write_text("page", output, text)
        print(f"{output}: {len(text.encode()):,} bytes; open it in a browser")
    if export is not None:
        write_text("Perfetto trace", export, perfetto(trace))
        print(f"{export}: open it at ui.perfetto.dev or chrome://tracing")


def _live_page(url: str) -> str:
    kind, text = fetch(url, "", missing_is_empty=True)
    if "html" not in kind or "mountViewer" not in text:
        raise ServerError(f"{url} has no live page; is it the address of minipaged serve?")
    return f"{root_of(url)}/"


def top(
    url: Annotated[str, Argument(help="The server, as http://127.0.0.1:8000.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, Option(help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print once and exit.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Watch a server in the terminal: requests, KV cache, tokens per second, latencies."""
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"interval is {interval}; give 0.1 to 3600 seconds")
    console = Console(highlight=False)
    panels = _panels(url, api_key, interval)
    if once or not console.is_terminal:
        with suppress(KeyboardInterrupt):
            for panel in islice(panels, 1) if once else panels:
                console.print(panel)
        return
    live = Live(next(panels), console=console, screen=True, auto_refresh=False)
    with restored_at_end(live.stop), live as shown, suppress(KeyboardInterrupt):
        for panel in panels:
            shown.update(panel, refresh=True)


def _panels(url: str, api_key: str | None, interval: float) -> Iterator[RenderableType]:
    """A dashboard now, and one after each interval."""
    last = _look(url, api_key)
    yield dashboard(url, last)
    while True:
        time.sleep(interval)
        try:
            now = _look(url, api_key)
        except ServerError as error:  # (it may be restarted, or slow)
            yield dashboard(url, last, trouble=without_controls(str(error)))
            continue
        yield dashboard(url, now, last)
        last = now


def _look(url: str, api_key: str | None) -> Scrape:
    _, text = fetch(url, "metrics", api_key=api_key)
    return read_metrics(text, url, time.monotonic())
