"""The beginning of a request's prompt, as the router compares it with those it has sent before."""

from __future__ import annotations

import json

from minipaged.routing import prefix_keys

KEY_TOKENS, KEY_CHARACTERS = 16, 64
"""A prompt has a key per 16 token ids (a block) or 64 characters (about as much text)."""


def look_at(body: bytes, authorization: str | None) -> tuple[list[int], int]:
    """(keys of the first prompt, number of prompts) of a body; ([], 1) if it is invalid.

    Keys differ where caches differ: by API key, `cache_salt`, model and tools.
    """
    try:
        fields = json.loads(body)
        prompt, messages = fields.get("prompt"), fields.get("messages", fields.get("input"))
        root = (authorization, *(json.dumps(fields.get(name)) for name in ("cache_salt", "model", "tools")))
        size = 1
        if messages is not None:
            parts = messages if isinstance(messages, list) else [messages]
            prompt = "".join(json.dumps(message) for message in (fields.get("instructions"), *parts))
        elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt, size = prompt[0], len(prompt)
        if isinstance(prompt, str):
            return prefix_keys(prompt, KEY_CHARACTERS, root), size
        ids = prompt if isinstance(prompt, list) else ()
        return prefix_keys(ids, KEY_TOKENS, root), size
    except (ValueError, TypeError, AttributeError, RecursionError):
        return [], 1
