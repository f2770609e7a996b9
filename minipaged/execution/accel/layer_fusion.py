"""Replace decoder layers and norms with faster ones that pass an equivalence check.

The model runs once, on a few rows, under an `EquivalenceContext` in place of attention. Then each candidate's
replacement (`fused_layer.py`) gets the same inputs; it must call attention with the same arguments and return
the same rows. Everything else stays as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.execution.accel.fused_layer import FusedLayer, FusedNorm, has_gelu
from minipaged.execution.accel.own_memory import return_freed_memory
from minipaged.execution.attention import set_forward_context
from minipaged.execution.subclassing import is_of_transformers
from minipaged.kernels.dispatch import LayerOperations
from minipaged.kernels.metadata import AttentionParameters

logger = logging.getLogger(__name__)

LAYERS = {
    *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
    *("GemmaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer", "Phi3DecoderLayer"),
    *("GraniteDecoderLayer", "MinistralDecoderLayer", "SmolLM3DecoderLayer"),
}
"""The layers of transformers that `FusedLayer` computes. Others may differ undetected (clipped queries), also
those in code that comes with a model."""


class EquivalenceContext:
    """A `ForwardContext` that records its calls and answers with the values: each row sees only itself."""

    output_indices: Tensor | None = None

    def __init__(self) -> None:
        self.calls: dict[int, tuple[Tensor, Tensor, Tensor, AttentionParameters]] = {}
        """Layer -> query, key, value and parameters."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, parameters: AttentionParameters
    ) -> Tensor:
        """Record and answer."""
        self.calls[module.layer_idx] = query.clone(), key.clone(), value.clone(), parameters
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class Call(NamedTuple):
    """One call of a module, and what it returned."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel, run: Callable[[], object], operations: LayerOperations) -> None:
    """Replace the layers and norms of a model whose replacements are equivalent; `run` feeds it rows."""
    if model.dtype not in operations.dtypes:
        return
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], out: Tensor) -> None:
        if _is_layer(module) or (len(arguments) == 1 and not keywords):  # (some norms take a gate, too)
            calls[module] = Call(arguments, keywords, out)

    with ExitStack() as hooks, set_forward_context(context := EquivalenceContext()):
        for module in model.modules():
            if _is_layer(module) or _is_norm(module):
                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        run()
    _replace_in(model, calls, context, operations)


def _is_layer(module: nn.Module) -> bool:
    if type(module).__name__ not in LAYERS or not is_of_transformers(module):
        return False
    parts = module.get_submodule("self_attn"), module.get_submodule("mlp")
    linears: list[Any] = [
        child for part in parts for name, child in part.named_children() if name.endswith("_proj")
    ]
    # (Subclasses of nn.Linear may do more than multiply.)
    return (
        all(map(is_of_transformers, parts))
        and all(type(linear) is nn.Linear for linear in linears)
        and len({linear.weight.dtype for linear in linears}) == 1
    )


def _is_norm(module: nn.Module) -> bool:
    epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    weight = getattr(module, "weight", None)
    is_known = isinstance(epsilon, float) and isinstance(weight, Tensor) and weight.dim() == 1
    return type(module).__name__.endswith("RMSNorm") and is_known


def _replace_in(
    parent: nn.Module, calls: dict[nn.Module, Call], context: EquivalenceContext, operations: LayerOperations
) -> None:
    for name in [name for name, _ in parent.named_children()]:  # names alone keep no layer alive
        child = getattr(parent, name)
        fused = _fused(child, calls.pop(child), context, operations) if child in calls else None
        if fused is None:
            _replace_in(child, calls, context, operations)
        else:
            setattr(parent, name, fused)
        del child  # the original's weights are freed before the next are stacked
        if isinstance(fused, FusedLayer):
            return_freed_memory()


def _fused(
    module: Any, call: Call, context: EquivalenceContext, operations: LayerOperations
) -> nn.Module | None:
    """A replacement that computes the same as the module, or None."""
    parameters = context.calls[module.self_attn.layer_idx][-1] if _is_layer(module) else None
    has_activation = parameters is None or has_gelu(module.mlp) is not None
    fused = FusedLayer(module, parameters, operations) if parameters else FusedNorm(module, operations)
    with set_forward_context(own_context := EquivalenceContext()):
        pairs: list[tuple[Tensor, Tensor]] = [(fused(*call.arguments, **call.keywords), call.output)]
    for layer, own_call in own_context.calls.items():
        pairs += zip(own_call[:3], context.calls[layer][:3])
    if has_activation and all(_agree(actual, expected) for actual, expected in pairs):
        return fused
    logger.info("%s is not equivalent to its fused form, so it is not fused", type(module).__name__)
    return None


def _agree(actual: Tensor, expected: Tensor) -> bool:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3}.get(actual.dtype, 2e-2)
    actual, expected = actual.float(), expected.float()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
