"""The memory as it changes, for anyone who watches: the lines of a trace as server-sent events.

A stream is a trace (`viewer/trace.py`) from the moment of joining: a header, a line with everything in the
memory (event "snapshot"), then a line per step; "idle" reports what changed without a step. A header within
the stream starts over, because the listener was too slow and has lost lines. The engine never waits for a
listener, and does no work for the trace while there is none.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

from minipaged.async_llm import AsyncLLM
from minipaged.serving.errors import RETRY_AFTER, ApiError
from minipaged.viewer.trace import TraceLines

MOST_LISTENERS = 32
MOST_LINES = 256
"""Lines that may wait for a listener; beyond, it starts over."""

QUIET = 0.25
"""Seconds without a line after which a listener asks what changed without a step."""

TOKENS = {"texts", "completions", "token_ids", "draft", "output"}
"""Fields of a line, at any depth, that reveal tokens."""


class LiveTrace:
    """The listeners of an engine.

    Args:
        llm: the engine.
        with_tokens: whether to send token ids and texts, or only who has which blocks.
    """

    def __init__(self, llm: AsyncLLM, with_tokens: bool) -> None:
        self._llm = llm
        self._with_tokens = with_tokens
        self._num_listeners = 0
        self._lines: TraceLines | None = None  # this and the next belong to the engine's thread
        self._listeners: list[_Listener] = []
        self.is_closed = False

    def listen(self) -> AsyncGenerator[str]:
        """Events for one listener, until the server or the engine ends. Raises ApiError for too many."""
        if self._num_listeners >= MOST_LISTENERS:
            message = f"{MOST_LISTENERS} listeners are here already; close one"
            raise ApiError(429, message, code="too_many_listeners", headers=RETRY_AFTER)
        return self._events()

    async def _events(self) -> AsyncGenerator[str]:
        self._num_listeners += 1
        listener = _Listener(self)
        self._llm.between_steps(partial(self._join, listener))
        try:
            while not self.is_closed and self._llm.is_running:
                while listener.lines:
                    yield f"data: {listener.lines.popleft()}\n\n"
                listener.news.clear()
                try:
                    async with asyncio.timeout(QUIET):
                        await listener.news.wait()
                except TimeoutError:
                    self._llm.between_steps(self._synchronize)
        finally:
            self._num_listeners -= 1
            self._llm.between_steps(partial(self._leave, listener))

    def restart(self, listener: _Listener) -> None:
        """Make a listener start over."""
        self._llm.between_steps(partial(self._begin, listener))

    # -- the engine's thread, between two steps or at the end of one -----------------------------

    def _join(self, listener: _Listener) -> None:
        if self._lines is None:
            self._lines = TraceLines(self._llm.engine, self._publish)
            self._lines.synchronize("snapshot")
        self._listeners.append(listener)
        self._begin(listener)

    def _begin(self, listener: _Listener) -> None:
        if self._lines is not None and listener in self._listeners:  # else it has left
            state = self._shown(json.dumps(self._lines.state()))
            listener.send(listener.begin, [json.dumps(self._lines.header), state])

    def _leave(self, listener: _Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners and self._lines is not None:
            self._lines.close()
            self._lines = None

    def _synchronize(self) -> None:
        if self._lines is not None:
            self._lines.synchronize("idle")

    def _publish(self, line: str) -> None:
        line = self._shown(line)
        for listener in self._listeners:
            listener.send(listener.put, line)

    def _shown(self, line: str) -> str:
        """A line, without tokens if they are hidden."""
        return line if self._with_tokens else json.dumps(json.loads(line, object_hook=_without_tokens))


def _without_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in TOKENS}


class _Listener:
    """Lines for one, bounded. All methods but `send` run in its event loop."""

    def __init__(self, trace: LiveTrace) -> None:
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._is_behind = True  # a restart is on its way
        self.lines: deque[str] = deque()
        self.news = asyncio.Event()

    def send(self, method: Any, value: Any) -> None:
        """Call a method in its event loop, unless that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(method, value)

    def begin(self, lines: list[str]) -> None:
        """Start with these."""
        self.lines = deque(lines)
        self._is_behind = False
        self.news.set()

    def put(self, line: str) -> None:
        """One more line; if there are too many, all are dropped and the stream starts over."""
        if self._is_behind:
            return
        if len(self.lines) >= MOST_LINES:
            self.lines.clear()
            self._is_behind = True
            self._trace.restart(self)
            return
        self.lines.append(line)
        self.news.set()
