"""The embedded model's tokenizer with the tags of reasoning in place of two other special tokens."""

from __future__ import annotations

from pathlib import Path

from minipaged import pocket_model

REPLACED = {"<|user|>": "<think>", "<|begin|>": "</think>"}


def write_tokenizer(folder: Path) -> Path:
    """Write it into a folder."""
    for file in pocket_model.PATH.iterdir():
        if "token" in file.name:
            text = file.read_text()
            for old, new in REPLACED.items():
                text = text.replace(old, new)
            (folder / file.name).write_text(text)
    return folder
