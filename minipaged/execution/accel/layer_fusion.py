"""Which layers of a model give way to faster ones: those whose stand-ins prove that they compute the same.

The model runs once, on a few rows, under a `Trial` in the place of attention. Then each candidate's stand-in
(`minipaged/execution/accel/fused_layer.py`) gets the inputs its original got, and must ask the same of attention and return the
same rows. Everything else stays as it was. Does NOT know: pools, plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.execution.accel.fused_layer import FusedLayer, FusedNorm
from minipaged.execution.accel.packed_linear import is_plain
from minipaged.execution.attention import Options, attention_step, step_in_force
from minipaged.kernels.cpp.elementwise import DTYPES

logger = logging.getLogger(__name__)

LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""The layers that `FusedLayer` draws. Other names may hide what no trial shows, such as a clipped query."""

PRODUCTS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]


class Trial:
    """An `AttentionStep` that notes what is asked and answers with the values, as if each row saw itself.

    Attributes:
        asked: layer -> query, key, value and options.
    """

    rows_wanted: Tensor | None = None

    def __init__(self) -> None:
        self.asked: dict[int, tuple[Tensor, Tensor, Tensor, Options]] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Note and answer."""
        self.asked[module.layer_idx] = query.clone(), key.clone(), value.clone(), options
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class Call(NamedTuple):
    """One call of a module, and what it returned."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel, run: Callable[[], object]) -> None:
    """Put stand-ins in place of the layers and norms that they reproduce.

    Args:
        model: prepared, on the CPU.
        run: runs the model once, on a few rows.
    """
    if model.dtype not in DTYPES:
        return
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> None:
        calls[module] = Call(arguments, keywords, output)

    with ExitStack() as hooks, attention_step(trial := Trial()):
        for module in model.modules():
            if _is_layer(module) or _is_norm(module):
                hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        run()
    _replace_in(model, calls, trial)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__ in LAYERS and all(is_plain(module.get_submodule(name)) for name in PRODUCTS)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _replace_in(parent: nn.Module, calls: dict[nn.Module, Call], trial: Trial) -> None:
    for name, child in list(parent.named_children()):
        stand_in = _stand_in(child, calls.pop(child), trial) if child in calls else None
        if stand_in is None:
            _replace_in(child, calls, trial)
        else:
            setattr(parent, name, stand_in)  # the original's weights are freed before the next are packed


def _stand_in(module: Any, call: Call, trial: Trial) -> nn.Module | None:
    """What computes the same as the module, or None."""
    if _is_layer(module):
        layer = module.self_attn.layer_idx
        is_last = layer == module.self_attn.config.num_hidden_layers - 1
        stand_in: nn.Module = FusedLayer(module, step_in_force, trial.asked[layer][-1], is_last)
    else:
        stand_in = FusedNorm(module)
    with attention_step(own_trial := Trial()):
        pairs: list[tuple[Tensor, Tensor]] = [(stand_in(*call.arguments, **call.keywords), call.output)]
    for layer, asked in own_trial.asked.items():
        pairs += zip(asked[:3], trial.asked[layer][:3])
    if all(_agree(actual, expected) for actual, expected in pairs):
        return stand_in
    logger.info("%s is not what its name promises and stays as it is", type(module).__name__)
    return None


def _agree(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-4 if actual.dtype == torch.float32 else 3e-2
    actual, expected = actual.float(), expected.float()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
