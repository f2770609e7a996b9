"""Results as JSON lines: each is on disk as soon as it is known, so a killed run keeps what it had."""

import json
from pathlib import Path
from typing import Any


class Records:
    """Appends to a file; None keeps nothing. Several processes may write the same file, a line at a time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        """Write one record."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reason_of(error: BaseException) -> str:
    """One short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
