"""Connections that never finish the header of a request are closed; a lack of file descriptors is logged.

The application sees a request only once its header is complete, and uvicorn's own timer runs only until the
next byte. A connection that uvloop cannot accept is reset without a word.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)


class Connections:
    """Looks at a server's connections from time to time.

    Args:
        seconds: that a connection may take for the header of a request.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting_since: dict[tuple[Any, Any], float] = {}  # by connection and its last request
        self._is_exhausted = False

    def look(self, connections: Iterable[Any]) -> None:
        """Close those that wait too long for a header; `connections` are uvicorn's protocols."""
        now = time.monotonic()
        waiting = [(one, one.cycle) for one in connections if _waits_for_a_header(one)]
        self._waiting_since = {key: self._waiting_since.get(key, now) for key in waiting}
        for (connection, _), since in self._waiting_since.items():
            if now - since > self._seconds:
                connection.transport.close()

    def check_descriptors(self, num_connections: int) -> None:
        """Log once if there are no more file descriptors, until there are some again."""
        was_exhausted, self._is_exhausted = self._is_exhausted, not has_free_descriptor()
        if self._is_exhausted and not was_exhausted:
            logger.error(
                "Too many open files: %d connections are open and no more are accepted; "
                "raise the limit (ulimit -n)",
                num_connections,
            )


def _waits_for_a_header(connection: Any) -> bool:
    """Whether no request is under way, and none of uvicorn's timers runs."""
    cycle = connection.cycle
    return cycle is None or (cycle.response_complete and connection.timeout_keep_alive_task is None)


def has_free_descriptor() -> bool:
    """Whether this process may open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
