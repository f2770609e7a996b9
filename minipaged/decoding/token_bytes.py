"""The bytes of single tokens: one that is a part of a character has no text of its own.

Of the bytes of 日, which are E6 97 A5, byte-level BPE has such tokens as "æĹ" (E6 97), and a vocabulary with
byte fallback "<0xE6>", "<0x97>" and "<0xA5>".
"""

from __future__ import annotations

import re
from typing import Any

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN]
BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The characters with which byte-level BPE writes bytes (those of GPT-2's encoder)."""


def token_bytes(tokenizer: Any, token_id: int, text: str) -> bytes:
    """The bytes that a token stands for.

    Args:
        tokenizer: a transformers tokenizer.
        token_id: one of its tokens.
        text: what it decodes to, by itself.
    """
    if "\ufffd" in text:
        name = tokenizer.convert_ids_to_tokens(token_id)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(byte[1])
        if BYTES.keys() >= set(name):
            return bytes(BYTES[character] for character in name)
    return text.encode()
