"""The embedded model's tokenizer with a pair of tags, as special tokens, in place of two others."""

from __future__ import annotations

from pathlib import Path

from minipaged import pocket_model


def write_tokenizer(folder: Path, name: str) -> Path:
    """Write the tokenizer with `<name>` and `</name>` into a folder."""
    for file in pocket_model.PATH.iterdir():
        if "token" in file.name:
            text = file.read_text().replace("<|user|>", f"<{name}>").replace("<|begin|>", f"</{name}>")
            (folder / file.name).write_text(text)
    return folder
