"""Log-probabilities in OpenAI's and vLLM's formats."""

from __future__ import annotations

from collections.abc import Reversible
from typing import Any

from minipaged.decoding.detokenizer import Detokenizer, Window
from minipaged.decoding.token_bytes import token_bytes
from minipaged.outputs import CompletionOutput, Logprob, RequestOutput

TopLogprobs = dict[int, Logprob]

LEAST = -9999.0
"""In place of -inf, which JSON lacks."""


def finite(logprob: float) -> float:
    """A log-probability as valid JSON."""
    return max(logprob, LEAST)


def prompt_logprobs(output: RequestOutput, count: int | None) -> dict[str, Any]:
    """The field of a prompt's tokens, if requested: each with its `count` likeliest alternatives by token id,
    as in vLLM; null for the first."""
    if count is None or output.prompt_logprobs is None:
        return {}

    def row(chosen: int, top: TopLogprobs) -> dict[str, Any]:
        return {
            str(i): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for i, one in top.items()
            if one.rank <= count or i == chosen
        }

    tokens = zip(output.prompt_token_ids, output.prompt_logprobs)
    return {"prompt_logprobs": [None if top is None else row(chosen, top) for chosen, top in tokens]}


def chat_logprobs(tokenizer: Any, completion: CompletionOutput, count: int) -> dict[str, Any] | None:
    """A chat's object, if requested: the generated tokens, each with its `count` likeliest alternatives."""
    if completion.logprobs is None:
        return None

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        text = one.decoded_token or ""
        data = token_bytes(tokenizer, token_id, text)
        return {"token": text, "logprob": finite(one.logprob), "bytes": list(data)}

    content = []
    for token_id, top in zip(completion.token_ids, completion.logprobs):
        best = sorted((one.rank, i, one) for i, one in top.items() if one.rank <= count)
        likeliest = [entry(i, one) for _, i, one in best]
        content.append({**entry(token_id, top[token_id]), "top_logprobs": likeliest})
    return {"content": content}


def completion_logprobs(
    tokenizer: Any, tops: list[TopLogprobs | None], token_ids: list[int], starts: list[int], count: int
) -> dict[str, Any]:
    """A completion's object: columns, with a row for each token.

    Args:
        tokenizer: of the model; None if it has none (then no prompt is echoed).
        tops: each token's log-probability and alternatives; None for a prompt's first, which has none.
        token_ids: the tokens.
        starts: where in the text each begins.
        count: how many of the likeliest tokens to list; the chosen one is always listed.
    """

    def name(token_id: int, text: str | None) -> str:
        if text is not None and "\ufffd" in text:  # so that parts of characters differ
            data = token_bytes(tokenizer, token_id, text)
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return str(token_id) if text is None else text

    tokens: list[str] = []
    values: list[float | None] = []
    likeliest: list[dict[str, float] | None] = []
    for token_id, top in zip(token_ids, tops):
        if top is None:
            tokens.append(name(token_id, tokenizer.decode([token_id])))
            values.append(None)
            likeliest.append(None)
            continue
        tokens.append(name(token_id, top[token_id].decoded_token))
        values.append(finite(top[token_id].logprob))
        chosen = [(i, one) for i, one in top.items() if one.rank <= count or i == token_id]
        likeliest.append({name(i, one.decoded_token): finite(one.logprob) for i, one in chosen})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": starts}


class TextOffsets:
    """Where in the text of its answer each token begins; parts of a character begin where it does.

    Args:
        detokenizer: makes the text; None: there is none, and every token begins at 0.
        prompt_token_ids: what precedes the text.
    """

    def __init__(self, detokenizer: Detokenizer | None, prompt_token_ids: Reversible[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._window = Window() if detokenizer is None else detokenizer.window_after(prompt_token_ids)
        self._next = 0

    def of(self, token_ids: list[int]) -> list[int]:
        """Of the next tokens."""
        starts = []
        for token_id in token_ids:
            starts.append(self._next)
            if self._detokenizer is not None:
                self._window, text = self._detokenizer.push(self._window, token_id)
                self._next += len(text)
        return starts
