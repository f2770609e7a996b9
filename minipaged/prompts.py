"""What a prompt may be: a text, token ids, or a mapping with either."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.scheduling import RequestTooLongError
from minipaged.text_io import cut, lone_surrogate


class TextPrompt(TypedDict):
    """A text; `cache_salt`: cached prefixes are shared only among prompts with the same one."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is their text, if known, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Token ids may also be a NumPy array or a torch tensor with one dimension."""

KEYS = ("prompt", "prompt_token_ids", "cache_salt")
"""Keys of a prompt that is a mapping."""

OTHER_KEYS = ("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids")
"""vLLM's other keys: only None."""

TAKEN = 'give a string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": [...]}'


class RequestError(ValueError):
    """A request that the engine cannot accept; the message names the value and the fix."""


class FailedRequestError(RequestError):
    """A request that ended with finish reason "error" while it was streamed; the message is the reason."""


def read_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list; a list or array of integers is one. Raises RequestError."""
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts is {shortened(prompts)}; give a string or a list of prompts")
    prompts = list(prompts)
    is_one = bool(prompts) and isinstance(_plain(prompts[0]), Integral)
    return [prompts] if is_one else prompts


@contextmanager
def named(index: int, prompts: Sequence[Any], name: str = "prompts") -> Iterator[None]:
    """Errors about the prompt at `index` say so, if there are several: "prompts[2]: the prompt is empty"."""
    try:
        yield
    except (RequestError, RequestTooLongError) as error:
        if len(prompts) > 1:
            error.args = (f"{name}[{index}]: {error}",)
        raise


def split_prompt(prompt: Any) -> tuple[str | None, Any, str]:
    """A prompt's text, its token ids (each None if not given) and its cache salt.

    Raises:
        RequestError: it is not a `Prompt`. The token ids are not checked here.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping) or not ("prompt" in prompt or "prompt_token_ids" in prompt):
        raise RequestError(f"the prompt is {shortened(prompt)}; {TAKEN}")
    for key, value in prompt.items():
        if key not in KEYS and (value is not None or key not in OTHER_KEYS):
            near = difflib.get_close_matches(str(key), [own for own in KEYS if own not in prompt], n=1)
            hint = f"did you mean {near[0]}?" if near else f"give {', '.join(KEYS)}"
            raise RequestError(f"the prompt has the key {key!r}; {hint}")
    text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
    if "prompt" in prompt and not isinstance(text, str) and not (text is None and token_ids is not None):
        raise RequestError(f"the prompt's text is {shortened(text)}; give a string")
    if "prompt_token_ids" in prompt and token_ids is None:
        raise RequestError("the prompt's token ids are None; give a list of integers")
    if text == "" and token_ids is None:
        raise RequestError("the prompt is empty; give at least one character")
    if wrong := lone_surrogate(text or ""):
        raise RequestError(f"the prompt {wrong}")
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is {shortened(salt)}; give a string")
    if wrong := lone_surrogate(salt):
        raise RequestError(f"cache_salt {wrong}")
    return text, token_ids, salt


def check_token_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """The token ids as Python integers (NumPy's and torch's are accepted, too).

    Raises:
        RequestError: there are none, or one is not in the model's vocabulary.
    """
    token_ids = _plain(token_ids)
    if isinstance(token_ids, str | bytes | Mapping) or not hasattr(token_ids, "__len__"):
        raise RequestError(f"the prompt's token ids are {shortened(token_ids)}; give a list of integers")
    if not len(token_ids):
        raise RequestError("the prompt is empty; give at least one token")
    token_ids = list(token_ids)
    if set(map(type, token_ids)) != {int}:
        token_ids = [_integer(token_id) for token_id in token_ids]
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"the prompt has token id {wrong}; give one of the model's, 0 to {vocab_size - 1}")
    return token_ids


def _integer(token_id: Any) -> int:
    token_id = _plain(token_id)
    if isinstance(token_id, bool) or not isinstance(token_id, Integral):
        raise RequestError(f"the prompt has {shortened(token_id)} as a token id; give integers")
    return int(token_id)


def check_params(params: Any) -> DecodingParams:
    """The parameters themselves. Raises RequestError for anything else."""
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise RequestError(f"sampling_params is {shortened(params)}; give SamplingParams or BeamSearchParams")
    return params


def shortened(value: Any) -> str:
    """The repr of a value, in one line of at most 80 characters."""
    return cut(" ".join(repr(value).split()))


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers and torch's tensors as Python's lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
