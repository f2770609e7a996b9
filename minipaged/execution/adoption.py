"""A model is made to call us: its attention layers the hook, its recurrent layers piece by piece.

What attends through transformers' interface is switched there (`attention.prepare`); what is older, or
recurrent, gets a method of ours (`subclassing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution import older_attention
from minipaged.execution.attention import NAME, UnsupportedModelError, prepare
from minipaged.execution.recurrent import compute_piecewise
from minipaged.execution.subclassing import give_back


@contextmanager
def adopted(model: PreTrainedModel) -> Iterator[None]:
    """Inside the `with`, and afterwards, the model calls us, unless the block refuses it: then it runs
    elsewhere as before.

    Raises:
        UnsupportedModelError: the model would compute something else than its own attention; names its class.
        ConfigError: of the block.
    """
    own_attention = model.config._attn_implementation
    try:
        compute_piecewise(model)
        older_attention.adopt(model)
        prepare(model, needs_positions=not older_attention.is_biased(model))
        yield
    except (UnsupportedModelError, ConfigError) as reason:
        if own_attention != NAME:  # (or another runner would lose it)
            for module in model.modules():
                give_back(module)
            model.config._attn_implementation = own_attention  # (of an older model transformers would refuse)
            model.set_attn_implementation(own_attention)
        if isinstance(reason, ConfigError):
            raise
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}") from reason
