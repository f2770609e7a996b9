"""What `minipaged bench` runs: the requests of a file, or random ones.

The file is a JSON list of {"prompt": TEXT, "max_tokens": n}, or "prompt_token_ids" instead of "prompt".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import NotRequired, TypedDict

from minipaged.prompts import shortened
from minipaged.text_io import read_json


class WorkloadError(ValueError):
    """The workload file cannot be used."""


class WorkloadItem(TypedDict):
    """One request of a workload file: a text or token ids."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    max_tokens: int


def read_workload(path: Path) -> list[WorkloadItem]:
    """Read a workload file; raises `TextError` if it has no JSON, `WorkloadError` if it is unusable."""
    items = read_json("workload", path)
    if not isinstance(items, list):
        raise WorkloadError(f"workload {path} must be a JSON list; give at least one request")
    if not items:
        raise WorkloadError(f"workload {path} is empty; give at least one request")
    for number, item in enumerate(items):
        if not isinstance(item, dict) or set(item) not in (
            {"prompt", "max_tokens"},
            {"prompt_token_ids", "max_tokens"},
        ):
            raise WorkloadError(
                f'entry {number} of {path} is {shortened(item)}; give {{"prompt": TEXT, "max_tokens": n}} or '
                '{"prompt_token_ids": [at least one id], "max_tokens": n}'
            )
        count = item["max_tokens"]
        if type(count) is not int or count < 1:
            raise WorkloadError(
                f"entry {number} of {path}: max_tokens is {shortened(count)}; give an integer of at least 1"
            )
        if "prompt" in item:
            text = item["prompt"]
            if not isinstance(text, str) or not text:
                raise WorkloadError(f"entry {number} of {path}: prompt is {shortened(text)}; give a text")
            continue
        ids = item["prompt_token_ids"]
        wrong = [i for i in ids if type(i) is not int] if isinstance(ids, list) else [ids]
        if wrong or not ids:
            shown = shortened(wrong[0] if wrong else ids)
            raise WorkloadError(
                f"entry {number} of {path}: prompt_token_ids has {shown}; give at least one token id"
            )
    return items


def random_workload(requests: int, *sizes: int, **options: int) -> list[WorkloadItem]:
    """The first `requests` (at least 1) of `random_requests`, which takes the other arguments."""
    if requests < 1:
        raise WorkloadError(f"requests is {requests}; give at least 1")
    return list(islice(random_requests(*sizes, **options), requests))


def random_requests(
    prompt_tokens: int, output_tokens: int, vocab_size: int = 256, shared_prefix: int = 0, seed: int = 0
) -> Iterator[WorkloadItem]:
    """Requests of these sizes without end, with token ids drawn at random.

    Args:
        prompt_tokens, output_tokens: at least 1.
        vocab_size: token ids are below; every model's vocabulary has 256.
        shared_prefix: tokens that all prompts begin with.
        seed: of the draws.
    """
    for name, value in {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}.items():
        if value < 1:
            raise WorkloadError(f"{name} is {value}; give at least 1")
    if not 0 <= shared_prefix <= prompt_tokens:
        raise WorkloadError(
            f"shared_prefix is {shared_prefix}; give a number from 0 to {prompt_tokens}, "
            "the length of a prompt"
        )
    draw = partial(random.Random(seed).choices, range(vocab_size))
    prefix = draw(k=shared_prefix)
    return (
        {"prompt_token_ids": prefix + draw(k=prompt_tokens - shared_prefix), "max_tokens": output_tokens}
        for _ in count()
    )
