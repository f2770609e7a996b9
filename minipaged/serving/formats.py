"""Small parts of responses that several endpoints share."""

from __future__ import annotations

from typing import Any

from minipaged.outputs import Logprob

LEAST = -9999.0
"""In the place of -inf, which JSON does not have."""


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return max(logprob, LEAST)


def prompt_logprobs(tops: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Per prompt token its likeliest alternatives by token id, as vLLM reports them; None for the first."""
    return [
        None
        if top is None
        else {
            str(token_id): {
                "logprob": finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in top.items()
        }
        for top in tops
    ]


def chat_logprobs(tops: list[dict[int, Logprob]], token_ids: list[int], count: int) -> dict[str, Any]:
    """OpenAI's object for generated tokens: each with its `count` likeliest alternatives."""
    content = []
    for token_id, top in zip(token_ids, tops):
        best = sorted((one for one in top.values() if one.rank <= count), key=lambda one: one.rank)
        content.append({**_token(top[token_id]), "top_logprobs": [_token(one) for one in best]})
    return {"content": content}


def _token(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": finite(one.logprob), "bytes": list(text.encode())}
