"""Reading text and writing results: if this fails, one clear line says why."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

LARGEST = 1 << 28
"""The most bytes that are read from a file: `/dev/zero` has no end."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextError(ValueError):
    """Text that cannot be read or written; the message names the file or the character, and the fix."""


def read_text(what: str, path: str | Path) -> str:
    """The text of a file; `what` names its role in the message.

    Raises:
        TextError: it cannot be read, has no end, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # the latter: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise TextError(f"cannot read {what} {path}: {reason}; give a readable file") from error
    if len(data) > LARGEST:
        raise TextError(f"{what} {path} is larger than {LARGEST >> 20} MiB; give a smaller file")
    return decode(f"{what} {path}", data)


def decode(what: str, data: bytes) -> str:
    """UTF-8 bytes as text. Raises `TextError` if they are something else."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise TextError(
            f"{what} is not UTF-8 text: byte {byte:#04x} at position {error.start}; save it as UTF-8"
        ) from error
    if "\0" in text:  # (as in UTF-16)
        raise TextError(f"{what} has a null character at position {text.index(chr(0))}; save it as UTF-8")
    return text


def check_line(what: str, line: str) -> None:
    """Raise `TextError` for a line of another encoding, read as UTF-8 with `errors="surrogateescape"`."""
    decode(what, line.encode(errors="surrogateescape"))


def read_json(what: str, path: str | Path) -> Any:
    """The value in a JSON file. Raises `TextError` if it cannot be read or is not JSON."""
    text = read_text(what, path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        raise TextError(f"{what} {path} is not JSON: {reason}; give a JSON file") from error


def lone_surrogate(text: str) -> str | None:
    """What is wrong with a string that is not Unicode text (such as bytes of another encoding), or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start]
        return f"has {character!r} at position {error.start}, which is no Unicode character; give UTF-8 text"
    return None


def check_writable(what: str, path: Path | None, *sources: str | Path | None) -> None:
    """Raise `TextError` if a result could not be written to this file, or if the file is one of the sources;
    call it before there is a result."""
    if path is None:
        return
    existed = os.path.exists(path)  # (False where `Path.exists` raises, as for a name that is too long)
    for source in sources:
        if source and existed and os.path.exists(source) and os.path.samefile(path, source):
            raise TextError(f"{what} {path} is the input itself; give another file")
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TextError(f"cannot write {what} {path}: {reason}; give a writable file") from error
    if not existed:
        path.resolve().unlink()  # (not a link to it)


def write_text(what: str, path: Path, text: str) -> None:
    """Write a result; if the file does not take it, keep it in a temporary one and raise `TextError`."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise TextError(f"cannot write {what} {path}: {error.strerror}; {keep(text)}") from error


def keep(text: str) -> str:
    """Put text that has no other place into a temporary file; returns a sentence that says where."""
    try:
        handle, name = tempfile.mkstemp(prefix="minipaged-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        return f"nor can a temporary file be written ({error.strerror}); give a place with room"
    return f"the result is in {name}"


def cut(text: str, most: int = 80) -> str:
    """A text, or its beginning: at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def without_controls(text: str, is_terminal: bool = True) -> str:
    """A text for a terminal, to which control characters could do anything: they become U+FFFD, and a tab
    four spaces. Elsewhere it stays as it is."""
    return CONTROL.sub("\ufffd", text.replace("\t", "    ")) if is_terminal else text


def to_count(text: str) -> int:
    """A number as vLLM's command line reads it: 4k is 4,000, 4K is 4,096; 2GiB is the same as 2G."""
    found = re.fullmatch(r"([+-]?[0-9]+)(?:([kmgt])|([KMGT])(?:iB)?)?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a number; give one such as 4096, 4k (4,000), 4K (4,096) or 2GiB")
    number, decimal, binary = found.groups()
    power = " kmgt".index((decimal or binary or " ").lower())
    return int(number) * (1024 if binary else 1000) ** power


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
