"""The user's own functions that edit a row of logits; see `SamplingParams.logits_processors`.

If one fails, the step must not fail for all requests: its row becomes NaN, which the sampler cannot choose
from, and `failure` says why the request ends.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from minipaged.scheduling.request import Sequence

_failures: WeakKeyDictionary[Sequence, str] = WeakKeyDictionary()


def process(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocab_size] float32 as the processors of a sequence leave them; NaN if one fails.

    `logits` stay as they are: processors get a copy, which they may write to and even reshape.
    """
    prompt, generated = list(sequence.request.prompt_token_ids), sequence.output_token_ids
    edited: Any = logits.clone()
    for processor in sequence.request.params.logits_processors:
        try:
            tokens = (prompt, generated) if _num_arguments(processor) == 3 else (generated,)
            edited = processor(*tokens, edited)
            wrong = _what_is_wrong(edited, logits)
            edited = edited if wrong else edited.to(logits)
        except BaseException as error:  # the user's code: even SystemExit ends no other request
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which no other thread gets
            reason = "".join(traceback.format_exception_only(error))
            wrong = f"raised {' '.join(reason.split())}"
        if wrong is not None:
            name = getattr(processor, "__name__", type(processor).__name__)
            _failures[sequence] = (
                f"{name} of logits_processors {wrong}; return a tensor like the logits, without NaN or inf"
            )
            return torch.full_like(logits, torch.nan)
    return edited


def failure(sequence: Sequence) -> str | None:
    """Why the last step could not choose a token for a sequence, if a processor is to blame."""
    return _failures.pop(sequence, None)


def _num_arguments(processor: Callable[..., Any]) -> int:
    """How many positional arguments it requires."""
    function = processor.forward if isinstance(processor, torch.nn.Module) else processor
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # (some functions written in C have none)
        return 2
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_place and p.default is inspect.Parameter.empty for p in parameters)


def _what_is_wrong(edited: Any, like: torch.Tensor) -> str | None:
    if not isinstance(edited, torch.Tensor):
        return f"returned {type(edited).__name__ if edited is not None else None}"
    if edited.layout is not torch.strided:
        return f"returned a tensor of layout {edited.layout}"
    if edited.shape != like.shape:
        return f"returned a tensor of shape {list(edited.shape)}, not {list(like.shape)}"
    edited = edited.to(like)  # (float64 may overflow)
    return "returned NaN or infinity" if edited.isnan().any() or edited.isposinf().any() else None
