"""The executor of a rank: a `ModelRunner` over its part of the model.

    rank 0   execute: send the message -> moves, batch, forward -> logits of all ranks -> samples
    others   follow:  the same moves, the same batch, forward -> their logits to rank 0

Only rank 0 samples: the others get its tokens with the next message.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution import loading
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.batch import Batch, BatchBuilder
from minipaged.execution.distributed import RankError
from minipaged.execution.distributed.group import Group, give_up
from minipaged.execution.distributed.launch import Workers
from minipaged.execution.distributed.message import PlanDecoder, PlanEncoder
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.sharding import (
    Split,
    check_plan,
    fingerprint,
    split_weights,
    sum_over_ranks,
)
from minipaged.execution.distributed.stages import PARTS_PER_STAGE, Link, keep_stage, micro_batches
from minipaged.execution.distributed.threads import SharedThreads
from minipaged.execution.kv_cache import KVCache
from minipaged.execution.load_errors import in_one_line, within_memory
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.recurrent import find_recurrent
from minipaged.interrupts import DeferredInterrupts
from minipaged.kernels.dispatch import PagedAttention
from minipaged.scheduling import StepPlan, StepResult


class Report(NamedTuple):
    """What a rank sends to all others before the first step."""

    same: dict[str, Any]
    """What must be the same everywhere."""
    layers: list[str]
    """Types of the decoder layers; the same in a stage."""
    num_blocks: int
    num_host_blocks: int


def check_reports(reports: list[Report], tensor_size: int) -> None:
    """Raise RankError unless all ranks would compute parts of the same."""
    for rank, other in enumerate(reports):
        for what, value in reports[0].same.items():
            if other.same[what] != value:
                raise RankError(
                    f"rank {rank} differs from rank 0 in {what}: {other.same[what]} instead of {value}; "
                    "make all ranks agree"
                )
        beside = rank - rank % tensor_size
        if other.layers != reports[beside].layers:  # they may leave out rows in the last layer
            raise RankError(
                f"rank {rank} computes with different layers from rank {beside}: {other.layers} instead of "
                f"{reports[beside].layers}; restart, and report a bug if that does not help"
            )


def keep_part(model: PreTrainedModel, place: Place, link: Link) -> tuple[Split, range | None]:
    """Drop what other ranks compute; returns how the weights are split, and the layers that stay (None: all).

    Raises:
        UnsupportedModelError, ConfigError: so many ranks cannot share this model.
    """
    if find_recurrent(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with a recurrent state, which run on one rank only; "
            "set tensor_parallel_size and pipeline_parallel_size to 1"
        )
    split = Split([], [(0, model.get_output_embeddings().out_features)])
    if place.tensor_size > 1:
        check_plan(model, place.tensor_size)
        split = split_weights(model, place.shard, place.tensor_size)
    return split, keep_stage(model, place, link) if place.pipeline_size > 1 else None


class RankRunner(ModelRunner):
    """Computes a rank's part of every step; on rank 0 it is the engine's executor."""

    _can_capture = False  # not tried with collectives inside

    def __init__(self, name: str, config: EngineConfig, place: Place, device: torch.device) -> None:
        model = loading.load_model(name, config, torch.device("cpu"))
        self.place = place
        self._weights = fingerprint(model)
        self._link = Link(place)
        self._split, self.layers = keep_part(model, place, self._link)
        here = {path for path, _ in model.named_modules()}
        self._partial = [path for path in self._split.partial if path in here]
        with within_memory(name, device):
            model.to(device)  # type: ignore[arg-type]
            super().__init__(model, config)
        if device.type == "cpu":
            self.optimize()
        self.vocab_size = self._split.logits[-1][1] or self._split.logits[0][1]
        num_parts = place.pipeline_size * PARTS_PER_STAGE if place.pipeline_size > 1 else 1
        self._part_builders = [BatchBuilder(device) for _ in range(num_parts)]
        self._encoder = PlanEncoder(config.max_num_seqs)
        self._in_step = False
        self._failure: RankError | None = None

    def connect(
        self, group: Group, workers: Workers | None = None, threads: SharedThreads | None = None
    ) -> None:
        """Agree with the other ranks on versions, weights and the size of the pools.

        Raises:
            RankError: they differ.
        """
        self._group, self._workers, self._threads = group, workers, threads
        layers = [type(layer).__name__ for layer in getattr(self.model.base_model, "layers", ())]
        same = {
            "code of minipaged": _code(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "Python": platform.python_version(),
            **asdict(self._config),
            "weights": self._weights,
            "attention backend": self.backend.name,
        }
        reports = group.gather(Report(same, layers, self.num_blocks, self.num_host_blocks))
        check_reports(reports, self.place.tensor_size)
        sizes = [(report.num_blocks, report.num_host_blocks) for report in reports]
        self._resize(*(min(column) for column in zip(*sizes)))
        sum_over_ranks(self.model, self._partial, group.add_up)
        self._link.is_open = True

    def _resize(self, num_blocks: int, num_host_blocks: int) -> None:
        """Make the pools as large as those of the rank that can hold the least."""
        if (num_blocks, num_host_blocks) != (self.num_blocks, self.num_host_blocks):
            specs = {layer: spec for layer, (spec, _, _) in self.cache.pools.items()}
            self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
            del self.cache
            self.cache = KVCache(specs, num_blocks, num_host_blocks, self.block_size, self.backend)

    def use_attention(self, attention: PagedAttention) -> NoReturn:
        """Refused: the other ranks would keep their own."""
        raise ConfigError("a custom paged_attention runs on one rank only; set tensor_parallel_size to 1")

    def execute(self, plan: StepPlan) -> StepResult:
        """Rank 0: run one step on all ranks; see `Executor`.

        Raises:
            RankError: a rank died in this step or before; nothing can be computed any more.
        """
        if self._failure is not None:
            raise self._failure
        # A step that some ranks computed and others did not cannot be repeated.
        with DeferredInterrupts(patience=math.inf):
            try:
                self._in_step = True
                self._group.send(self._encoder.encode(plan))
                return super().execute(plan)
            except BaseException as error:
                if not self._in_step:
                    raise  # the sampler's; all ranks have computed the step
                self._failure = self._lost(error)
                raise self._failure from error

    def _lost(self, error: BaseException) -> RankError:
        reason = in_one_line(error)
        lost = RankError(f"the ranks lost each other: {reason}; restart all of them")
        if self._workers is not None:
            lost = self._workers.failure(reason)
        give_up()
        return lost

    @property
    def loss(self) -> str | None:
        """Why nothing can be computed any more; None: nothing is known. Any thread may ask."""
        if self._failure is not None:
            return str(self._failure)
        return None if self._workers is None else self._workers.loss

    @torch.inference_mode()
    def follow(self, decoder: PlanDecoder) -> None:
        """Other ranks: compute steps until rank 0 ends them."""
        while message := self._group.receive():
            plan = decoder.decode(message)
            self.move(plan)
            if plan.scheduled:
                self.forward(self.builder.build(plan.scheduled))

    def forward(self, batch: Batch) -> Tensor:
        """Like `ModelRunner.forward` on rank 0; other ranks send theirs there."""
        parts = [batch]
        if self.place.pipeline_size > 1:
            cut = micro_batches(batch.scheduled, len(self._part_builders))
            parts = [builder.build(part) for builder, part in zip(self._part_builders, cut)]
        computed = [self.compute(part) for part in parts]
        rank, shard = self.place.rank, self.place.shard
        if rank > 0 and self.place.is_last_stage and self._split.logits[shard][1]:
            for logits in computed:
                if len(logits):
                    self._link.begin(logits, 0)
        whole = computed[0] if rank else self._gather_logits(parts, computed)
        self._link.finish()
        self._in_step = False
        return whole

    def _gather_logits(self, parts: list[Batch], computed: list[Tensor]) -> Tensor:
        """Rank 0: the logits [R, V] of all micro-batches, from the ranks that have them."""
        counts = [len(part.output_indices) for part in parts]
        whole = computed[0].new_empty(sum(counts), self.vocab_size, dtype=self.model.dtype)
        first = 0
        for count, own in zip(counts, computed):
            for rank, (start, end) in zip(self.place.last_stage, self._split.logits):
                if count and end:
                    part = own
                    if rank > 0:
                        part = whole.new_empty(count, end - start)
                        dist.recv(part, rank)
                    whole[first : first + count, start:end] = part
            first += count
        return whole

    def close(self) -> None:
        """End the other ranks and the connections; nothing can be computed any more."""
        self._failure = self._failure or RankError("this LLM is shut down; build a new one")
        self._group.close()
        if self._workers is not None:
            self._workers.stop()
        if self._threads is not None:
            self._threads.give_back()


def _code() -> str:
    """A hash of this package's source."""
    package = Path(__file__).parents[2]
    files = sorted(package.rglob("*.py"))
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
