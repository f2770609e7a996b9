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

    def read(self) -> list[dict[str, Any]]:
        """All records of the file, none if there is no file."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def last_run(self) -> list[dict[str, Any]]:
        """The records since a machine was last described."""
        records = self.read()
        last = max((i for i, record in enumerate(records) if "versions" in record), default=-1)
        return records[last + 1 :]


def reason_of(error: BaseException) -> str:
    """One short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
