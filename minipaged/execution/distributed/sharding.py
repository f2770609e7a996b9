"""Tensor parallelism: each rank keeps its heads and its part of every MLP; partial results are summed.

        rows, whole on every rank
          | [Q K V] or [gate up]: each rank has some of the columns     ("colwise")
        its heads, its part of the MLP
          | output projection: each rank has the rows for its columns   ("rowwise")
        a partial sum -- all-reduce -> rows, whole on every rank

The model's own plan in transformers (`tp_plan`) says how each weight is split. It is applied here to plain
tensors, because transformers' own method replaces `forward` with DTensor code, which fused and packed layers
do not call. Source: M. Shoeybi et al., Megatron-LM, arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution.accel.fused_layer import FusedLayer
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.model_config import text_config

SPLIT = {"colwise", "rowwise", "packed_colwise", "moe_tp_experts"}
"""Supported styles of a plan."""

WHOLE = {
    *("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"),
    *("embedding_rowwise", "embedding_colwise", "replicate", "replicated_with_grad_allreduce"),
    *("mla_kv_a_proj", "local_params"),
}
"""Styles whose input and output are whole on every rank: there the weights are kept whole, too."""

IN_FUSED_LAYER = {"self_attn.o_proj": "attention_output", "mlp.down_proj": "mlp_output"}

INTEGERS = {4: torch.int32, 2: torch.int16}
"""By bytes per element."""


class Split(NamedTuple):
    """What `split_weights` did."""

    partial: list[str]
    """Modules whose outputs must be summed over the ranks."""
    logits: list[tuple[int, int]]
    """Each rank's part of the vocabulary, for its logits; empty where another rank has them all."""


def bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """The part of `count` things that rank `rank` of `size` has."""
    return count * rank // size, count * (rank + 1) // size


def unknown_styles(model: PreTrainedModel) -> set[str]:
    """What the model's plan asks for that is not supported."""
    return set((model.tp_plan or {}).values()) - SPLIT - WHOLE


def splits_heads(model: PreTrainedModel) -> bool:
    """Whether transformers has a plan that splits the model's attention heads, and it is supported."""
    return not unknown_styles(model) and any(
        style == "colwise" and ("attn" in path or "attention" in path)
        for path, style in (model.tp_plan or {}).items()
    )


def stage_parts(model: PreTrainedModel) -> list[str]:
    """The parts of the model in the order of transformers' plan for stages; empty: it has no stages."""
    config = text_config(model)
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    return plan if "layers" in plan and not beyond_rows(config) else []


def beyond_rows(config: Any) -> list[str]:
    """Options that have layers need more than the rows of the layer before: K/V of another, or token ids."""
    options = "num_kv_shared_layers", "hidden_size_per_layer_input"
    return [option for option in options if getattr(config, option, None)]


def check_plan(model: PreTrainedModel, size: int) -> None:
    """Raise UnsupportedModelError or ConfigError unless `size` ranks can share the model's heads."""
    name, plan = type(model).__name__, model.tp_plan
    advice = "use pipeline_parallel_size, or 1" if stage_parts(model) else "give 1"
    if unknown := unknown_styles(model):
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but the plan of {name} asks for {', '.join(sorted(unknown))}, "
            f"which is not supported here; {advice}"
        )
    if not splits_heads(model):
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but transformers has no plan that splits the attention heads "
            f"of {name}; {advice}"
        )
    config = text_config(model)
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    heads = gcd(*(layer.num_attention_heads for layer in layers))
    kv_heads = gcd(*(getattr(layer, "num_key_value_heads", None) or heads for layer in layers))
    if heads % size or kv_heads % size:
        fit = [n for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the {heads} query and {kv_heads} K/V "
            f"heads of {name}; give {' or '.join(map(str, fit))}"
            + (", or use pipeline_parallel_size" if stage_parts(model) else "")
        )
    for path, weight in model.named_parameters():
        styles = _style(plan, path), _style(plan, path.rpartition(".")[0])
        of_heads = "attn" in path and weight.dim() > 1 and len(weight) in (heads, kv_heads)
        if of_heads and styles == (None, None):
            raise UnsupportedModelError(
                f"tensor_parallel_size is {size}, but the plan of {name} leaves {path} whole, "
                "which has a part for each head; use pipeline_parallel_size, or 1"
            )


def split_weights(model: PreTrainedModel, rank: int, size: int) -> Split:
    """Shard each weight in place: keep what rank `rank` of `size` needs.

    Until `sum_over_ranks` the model computes partial sums.
    """
    plan, head = model.tp_plan, model.get_output_embeddings()
    vocabulary = head.out_features
    partial = []
    logits = [(0, vocabulary), *[(0, 0)] * (size - 1)]  # if the head stays whole
    for path, module in list(model.named_modules()):
        style = _style(plan, path)
        if module is head:
            if style is not None:
                logits = [bounds(vocabulary, number, size) for number in range(size)]
                _keep_rows(module, slice(*logits[rank]))
        elif style == "moe_tp_experts":
            partial.append(path)
        elif style in SPLIT:
            if not isinstance(module, nn.Linear):
                raise UnsupportedModelError(f"{path} is a {type(module).__name__}, which cannot be split")
            if style == "rowwise":
                _keep_columns(module, slice(*bounds(module.in_features, rank, size)), rank)
                partial.append(path)
            else:
                _keep_rows(module, _rows(module.out_features, rank, size, style == "packed_colwise"))
    for path, weight in list(model.named_parameters()):
        style = _style(plan, path)
        if style in SPLIT:  # experts [E, rows, columns], or a number for each head
            axis = -1 if style == "rowwise" or weight.dim() == 1 else -2
            kept = _rows(weight.shape[axis], rank, size, style == "packed_colwise")
            owner, _, name = path.rpartition(".")
            _replace(model.get_submodule(owner), name, weight, kept, axis)
    return Split(partial, logits)


def sum_over_ranks(model: nn.Module, partial: list[str], add_up: Callable[[Tensor], object]) -> None:
    """From now on, sum the outputs of these modules, or of their replacements, over the ranks."""

    def after(module: nn.Module, arguments: Any, output: Tensor) -> None:
        add_up(output)

    for path in partial:
        _find(model, path).register_forward_hook(after)


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """A hash of all weights: each one's name, shape, type, and the sum of its bits, read as integers."""
    digest = blake2b(digest_size=16)
    for path, weight in model.named_parameters():
        bits = weight.detach().contiguous().view(-1).view(INTEGERS.get(weight.dtype.itemsize, torch.uint8))
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{path} {tuple(weight.shape)} {weight.dtype} {total}".encode())
    return digest.hexdigest()


def _style(plan: dict[str, str], path: str) -> str | None:
    return plan.get(".".join("*" if part.isdigit() else part for part in path.split(".")))


def _rows(count: int, rank: int, size: int, packed: bool) -> slice | Tensor:
    """A rank's part of `count` rows; of packed ones, its part of each half (gate and up)."""
    if not packed:
        return slice(*bounds(count, rank, size))
    first = torch.arange(*bounds(count // 2, rank, size))
    return torch.cat((first, count // 2 + first))


def _keep_rows(linear: nn.Linear, rows: slice | Tensor) -> None:
    _replace(linear, "weight", linear.weight, rows, 0)
    if linear.bias is not None:
        _replace(linear, "bias", linear.bias, rows, 0)
    linear.out_features = linear.weight.shape[0]


def _keep_columns(linear: nn.Linear, columns: slice, rank: int) -> None:
    _replace(linear, "weight", linear.weight, columns, 1)
    linear.in_features = linear.weight.shape[1]
    if rank > 0:
        linear.register_parameter("bias", None)  # added once


def _replace(module: nn.Module, name: str, weight: Tensor, kept: slice | Tensor, axis: int) -> None:
    index: list[Any] = [slice(None)] * weight.dim()
    index[axis] = kept
    setattr(module, name, nn.Parameter(weight.detach()[tuple(index)].clone(), requires_grad=False))


def _find(model: nn.Module, path: str) -> nn.Module:
    """The module at a path of the model as it was loaded."""
    module, parts = model, path.split(".")
    for number, part in enumerate(parts):
        if isinstance(module, FusedLayer):
            return module.get_submodule(IN_FUSED_LAYER[".".join(parts[number:])])
        module = module.get_submodule(part)
    return module
