"""Pipeline parallelism: each stage keeps some of the layers and passes its rows to the next.

    stage 0    embedding   layers 0 to 5     Send
    stage 1                Receive           layers 6 to 11    norm, head -> logits

Stand-ins replace the parts that a stage does not have, so the model's own `forward` runs on every stage. A
step is cut into micro-batches of whole sequences: while stage 1 computes the first, stage 0 computes the
second. Source: Y. Huang et al., GPipe, arXiv 1811.06965.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from minipaged.config import ConfigError
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.sharding import beyond_rows, bounds, splits_heads, stage_parts
from minipaged.execution.model_config import text_config
from minipaged.scheduling import ScheduledSequence
from minipaged.text_io import counted

PARTS_PER_STAGE = 2
"""Micro-batches of a step for each stage: with 2 stages, each idles 1 turn in 5."""


class Link:
    """From the layers of this stage to the ranks with the same shard in the stages beside it.

    Sends nothing before it is open: models are probed before the ranks are connected.
    """

    def __init__(self, place: Place) -> None:
        self.is_open = False
        self._previous, self._next = place.rank - place.tensor_size, place.rank + place.tensor_size
        self._sent: list[tuple[Any, Tensor]] = []  # (handle, what must live until then)

    def receive(self, rows: Tensor) -> Tensor:
        """The rows of the stage before, of the shape given."""
        if self.is_open:
            rows = torch.empty_like(rows)
            dist.recv(rows, self._previous)
        return rows

    def send(self, rows: Tensor) -> Tensor:
        """Begin to send rows to the next stage."""
        if self.is_open:
            self.begin(rows, self._next)
        return rows

    def begin(self, tensor: Tensor, rank: int) -> None:
        """Begin to send a tensor to a rank."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, rank), tensor))

    def finish(self) -> None:
        """Wait until everything is sent."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()


class StandIn(nn.Module):
    """In place of a decoder layer of another stage; next to the stage's own layers, it sends or receives."""

    def __init__(self, move: Any) -> None:
        super().__init__()
        self._move = move

    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        """Rows [1, T, D] -> the same, or those of the stage before."""
        return hidden_states if self._move is None else self._move(hidden_states)


class StandInEmbedding(nn.Module):
    """Some rows of the right shape; checks that run the model need them to differ."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight: Any = embedding.weight
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(16, weight.shape[1], generator=generator)
        self.rows: Tensor
        self.register_buffer("rows", rows.to(device=weight.device, dtype=weight.dtype), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [...] -> [..., D]."""
        return self.rows[input_ids % len(self.rows)]


def keep_stage(model: PreTrainedModel, place: Place, link: Link) -> range:
    """Drop what other stages compute; returns the layers that stay, as attention numbers them.

    Raises:
        UnsupportedModelError: transformers has no plan for stages of this model, or its layers need more
            than rows.
        ConfigError: more stages than layers.
    """
    name, config, size = type(model).__name__, text_config(model), place.pipeline_size
    parts = stage_parts(model)
    if not parts:
        more = beyond_rows(config)
        reason = f"{name} has {more[0]}" if more else f"transformers has no plan for stages of {name}"
        advice = "use tensor_parallel_size, or 1" if splits_heads(model) else "give 1"
        raise UnsupportedModelError(f"pipeline_parallel_size is {size}, but {reason}; {advice}")
    base: Any = model.get_decoder()
    count = len(base.layers)
    if size > count:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but {name} has only {counted(count, 'layer')}; "
            f"give at most {count}"
        )
    first, end = bounds(count, place.stage, size)
    for number in range(count):
        if not first <= number < end:
            move = {first - 1: link.receive, end: link.send}.get(number)
            base.layers[number] = StandIn(move)
    if place.stage > 0:
        model.set_input_embeddings(StandInEmbedding(model.get_input_embeddings()))
    if not place.is_last_stage:
        for part in parts[parts.index("layers") + 1 :]:
            setattr(base, part, nn.Identity())
        model.set_output_embeddings(nn.Identity())
    each = config.num_hidden_layers // count  # (2 where a decoder layer attends twice)
    return range(first * each, end * each)


def micro_batches(scheduled: list[ScheduledSequence], num_parts: int) -> list[list[ScheduledSequence]]:
    """Cut a step into at most `num_parts` runs of sequences with about as many tokens each."""
    left, count = sum(item.num_tokens for item in scheduled), 0
    parts: list[list[ScheduledSequence]] = []
    part: list[ScheduledSequence] = []
    for item in scheduled:
        part.append(item)
        count += item.num_tokens
        if count * (num_parts - len(parts)) >= left:
            parts.append(part)
            left, count, part = left - count, 0, []
    return parts
