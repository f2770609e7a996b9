"""Chromium without a driver: the DevTools protocol over a pair of pipes, JSON messages ending in NUL.

    with Browser() as browser:
        page = browser.open(url, width=400, dark=True)
        page.value("document.title");  page.problems;  page.requests

Only the standard library, and pytest to skip where there is no Chromium. Waits for events, never for a
time, except the limit after which it gives up.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
LIMIT = 60.0

# The protocol lives on descriptors 3 and 4 of the browser; both move up first, lest one overwrites the other.
LAUNCHER = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for descriptor, wanted in zip(high, (3, 4)):
    os.dup2(descriptor, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str:
    """The browser's path; skips the test if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    for path in filter(None, map(shutil.which, names)):
        return path
    pytest.skip("chromium is not installed; on Debian: apt-get install chromium")


@dataclass
class Page:
    """An open page: what it asked for, and what it complained of."""

    browser: Browser
    session: str
    context: str
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    loaded: bool = False

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.browser.call(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
            self.session,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Show the page in a window of another size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.call("Emulation.setDeviceMetricsOverride", metrics, self.session)

    def press(self, key: str) -> None:
        """Press and let go of "Tab", "Enter" or "ArrowRight"."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowRight": (39, "")}[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        for kind in ("keyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", {"type": kind, **event}, self.session)

    def reload(self) -> None:
        """Load the page again, and wait until it is loaded."""
        self.loaded = False
        self.browser.call("Page.reload", {}, self.session)
        self.browser.wait_until_loaded(self)

    def close(self) -> None:
        """Close the page and forget its context."""
        self.browser.call("Target.disposeBrowserContext", {"browserContextId": self.context})

    def wait_for(self, expression: str) -> None:
        """Return once a JavaScript expression is true."""
        script = (
            f"new Promise(done => {{ const look = () => ({expression}) ? done(true) : setTimeout(look, 20);"
            "look(); })"
        )
        self.value(script)

    def _event(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Network.responseReceived" and event["response"]["status"] >= 400:
            self.problems.append(f"{event['response']['status']} {event['response']['url']}")
        elif method == "Network.loadingFailed" and not event.get("canceled"):
            self.problems.append(event["errorText"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(str([argument.get("value") for argument in event["args"]]))
        elif method == "Page.loadEventFired":
            self.loaded = True


class Browser:
    """A Chromium of our own, with a new profile. Use as a context manager."""

    def __init__(self) -> None:
        path = find_chromium()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        command = [path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        launcher = [sys.executable, "-c", LAUNCHER, str(their_in), str(their_out), *command]
        self._process = subprocess.Popen(launcher, pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL)
        os.close(their_in)
        os.close(their_out)
        self._in, self._out = our_in, our_out
        self._selector = selectors.DefaultSelector()
        self._selector.register(our_in, selectors.EVENT_READ)
        self._buffer = b""
        self._ids = itertools.count(1)
        self._pages: dict[str, Page] = {}

    def open(self, url: str, width: int, dark: bool, beside: Page | None = None) -> Page:
        """Open an address and wait until it is loaded; `beside` a page, with what that one keeps."""
        context = beside and beside.context
        context = context or self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attach = {"targetId": target["targetId"], "flatten": True}
        session = self.call("Target.attachToTarget", attach)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable", {}, session)
        page.resize(width)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", {"features": features}, session)
        self.call("Page.navigate", {"url": url}, session)
        self.wait_until_loaded(page)
        return page

    def wait_until_loaded(self, page: Page) -> None:
        """Wait for the event that says so."""
        deadline = time.monotonic() + LIMIT
        while not page.loaded:
            self._receive(deadline)

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert self._selector.select(deadline - time.monotonic()), "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page._event(message["method"], message["params"])
        return message

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()
