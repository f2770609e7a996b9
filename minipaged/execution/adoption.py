"""Make a model call us: its attention layers call the hook, its recurrent layers run piece by piece.

Layers that attend through transformers' interface are switched there (`attention.prepare`); older and
recurrent ones get a method of ours (`subclassing.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from minipaged.execution import older_attention
from minipaged.execution.attention import NAME, UnsupportedModelError, prepare
from minipaged.execution.recurrent import compute_piecewise
from minipaged.execution.subclassing import give_back


def adopt(model: PreTrainedModel, build: Callable[[], None]) -> None:
    """Make the model call us, and call `build`; if that fails, the model runs elsewhere as before.

    (Not a context manager: a Ctrl-C on the way into one would undo nothing until its traceback is dropped.)

    Raises:
        UnsupportedModelError: the model would not compute its own attention; names its class.
    """
    own_attention = model.config._attn_implementation
    try:
        compute_piecewise(model)
        older_attention.adopt(model)
        prepare(model, needs_positions=not older_attention.is_biased(model))
        build()
    except BaseException as reason:
        if own_attention != NAME:  # (or another runner would lose it)
            for module in model.modules():
                give_back(module)
            model.config._attn_implementation = own_attention  # (transformers refuses an older model's)
            model.set_attn_implementation(own_attention)
        if isinstance(reason, UnsupportedModelError):
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}") from reason
        raise
