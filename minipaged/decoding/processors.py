"""The user's own functions that edit a row of logits; see `SamplingParams.logits_processors`.

If one fails, the step must not fail for all requests: its row becomes NaN, which the sampler cannot choose
from, and `failure` says why the request ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from minipaged.scheduling.request import Sequence

_failures: WeakKeyDictionary[Sequence, str] = WeakKeyDictionary()


def process(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocab_size] float32 as the processors of a sequence leave them; NaN if one fails."""
    prompt, generated = list(sequence.request.prompt_token_ids), sequence.output_token_ids
    for processor in sequence.request.params.logits_processors:
        try:
            told = (prompt, generated) if _num_arguments(processor) == 3 else (generated,)
            edited = processor(*told, logits)
            wrong = _what_is_wrong(edited, logits)
        except Exception as error:  # the user's code
            wrong = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        if wrong is not None:
            name = getattr(processor, "__name__", type(processor).__name__)
            _failures[sequence] = (
                f"{name} of logits_processors {wrong}; return a tensor like the logits, without NaN or inf"
            )
            return torch.full_like(logits, torch.nan)
        logits = edited.to(logits)
    return logits


def failure(sequence: Sequence) -> str | None:
    """Why the last step could not choose a token for a sequence, if a processor is to blame."""
    return _failures.pop(sequence, None)


def _num_arguments(processor: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(processor).parameters.values()
        return sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    except ValueError:  # (some functions written in C have none)
        return 2


def _what_is_wrong(edited: Any, logits: torch.Tensor) -> str | None:
    if not isinstance(edited, torch.Tensor):
        return f"returned {type(edited).__name__ if edited is not None else None}"
    if edited.shape != logits.shape:
        return f"returned a tensor of shape {list(edited.shape)}, not {list(logits.shape)}"
    if edited.isnan().any() or edited.isposinf().any():
        return "returned NaN or infinity"
    return None
