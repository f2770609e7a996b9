"""The executor over a Hugging Face decoder: moves, one forward pass over a ragged batch, sampling.

    StepPlan -> swap out, swap in, copies -> Batch -> model -> logits [R, V] -> samples

When it is built, passes without a pool determine each layer's K/V shapes (`probe.py`) and how much memory the
pool may have (`memory_budget.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.config import EngineConfig
from minipaged.decoding.sampling import Sampler, find_errors, prompt_logprobs
from minipaged.execution import loading, model_config
from minipaged.execution.accel.cuda_graph import CaptureError, CUDAGraphCapture, CUDAGraphRunner
from minipaged.execution.accel.optimize import optimize
from minipaged.execution.adoption import adopt
from minipaged.execution.attention import PagedContext, call_model, set_forward_context
from minipaged.execution.batch import Batch, BatchBuilder, num_predicted_prompt_tokens
from minipaged.execution.kv_cache import KVCache
from minipaged.execution.load_errors import within_memory
from minipaged.execution.memory_budget import (
    available_bytes,
    block_bytes,
    num_kept_states,
    pool_size,
    step_bytes,
)
from minipaged.execution.probe import Probe
from minipaged.execution.state_table import StateTable
from minipaged.kernels.dispatch import PagedAttention, select_backend
from minipaged.scheduling import Sample, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionCosts
from minipaged.scheduling.request import TopLogprobs

if TYPE_CHECKING:
    from minipaged.execution.accel.decode_runner import DecodeRunner  # loads C++

logger = logging.getLogger(__name__)

LOGPROB_ROWS = 128
"""Rows whose log-probabilities are computed at once, in float32."""

TokenSampler = Callable[[Tensor, list[ScheduledSequence]], list[Sample]]
"""Logits [R, V] of R sampling sequences -> one sample for each."""


class ModelRunner:
    """An `Executor` (see there) for one device.

    `model` is a causal language model of transformers, in eval mode on its device; its attention is switched
    to the pool's. The default `sampler` follows each request's parameters.

    Raises:
        UnsupportedModelError: the model would compute something other than its own attention.
        ConfigError: settings that this model cannot serve.
    """

    layers: range | None = None  # those that it computes, if others compute the rest
    num_spare_blocks = 0  # in the pool, beyond those that plans name

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, sampler: TokenSampler | None = None
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        # Called with the name of each stage of a step as it ends: "moves", "batch", "forward", "sample"; for
        # each layer of the forward pass "forward" (up to its attention), "write_kv" and "attention".
        self.stage_hooks: list[Callable[[str], None]] = []
        self._config = config
        adopt(model, partial(self._set_up, sampler))

    def _set_up(self, sampler: TokenSampler | None) -> None:
        model, config = self.model, self._config
        text_config = model_config.text_config(model)
        self.max_model_len = model_config.longest_sequence(text_config, config.max_model_len)
        probe = Probe(model, text_config, self.max_model_len)
        specs, self.vocab_size = probe.inspect(config.block_size, self.layers)
        self._is_recurrent = bool(probe.recurrent_layers)
        if not probe.in_chunks:
            logger.info("recurrent layers continue a chunked prompt token by token, which is slow")
        self.backend = select_backend(config.attention_backend, self.device)
        self.block_size = config.block_size
        self.block_bytes = block_bytes(specs, config.block_size)
        self._measure = partial(
            step_bytes, config, probe, specs, self.backend.name == "triton", self._can_capture
        )
        num_spare = self.num_spare_blocks
        available = partial(available_bytes, config, probe, self._measure)
        self.num_blocks, self.num_host_blocks = pool_size(
            config, self.block_bytes, self.max_model_len, available, num_spare
        )
        num_kept = num_kept_states(config, self.num_blocks * self.block_bytes, probe.state_bytes)
        self._states = StateTable(probe.in_chunks, num_kept) if self._is_recurrent else None
        self.kept_states: Container[int] | None = None if self._states is None else self._states.kept
        self.eos_token_ids = model_config.end_of_text(model, self.vocab_size)
        self.sampler = sampler or Sampler(self.eos_token_ids, config.seed, self.backend.greedy_tokens)
        self.cache = KVCache(
            specs, self.num_blocks + num_spare, self.num_host_blocks, config.block_size, self.backend
        )
        self.builder = BatchBuilder(self.device)
        self.decode_runner: CUDAGraphRunner | DecodeRunner | None = self._make_graph_runner()
        self.preemption_costs = PreemptionCosts.estimate(
            self.device.type, self.block_bytes, sum(weight.numel() for weight in model.parameters())
        )
        vars(model.config)["pad_token_id"] = None  # (else GPT-2 looks for it in each step)

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> ModelRunner:
        """A runner for a model directory or hub id; may raise ModelLoadError or ConfigError."""
        return cls.optimized(loading.load_model(name, config, loading.find_device(config.device)), config)

    @classmethod
    def optimized(cls, model: PreTrainedModel, config: EngineConfig) -> ModelRunner:
        """A runner that rewrites the model for speed; nothing else can use it then."""
        with within_memory(str(model.name_or_path), model.device):
            runner = cls(model, config)
            runner.optimize()
        if runner.backend.name == "cpp":
            runner.use_decode_runner()
        return runner

    def optimize(self) -> None:
        """Rewrite the model for speed, quantized if asked; nothing else can use it then."""
        rows = torch.arange(min(8, self.vocab_size, self.max_model_len), device=self.device)
        positions = rows * (self.max_model_len // len(rows))
        run = partial(call_model, self.model, rows[None], positions[None], rows)
        optimize(self.model, run, self.backend, self._config.quantization)

    def use_decode_runner(self) -> None:
        """Run each decode step in one C++ call from now on, if the optimized model allows it."""
        from minipaged.execution.accel.decode_runner import make_decode_runner  # loads C++

        positions = torch.arange(2)
        forward = partial(call_model, self.model, positions=positions[None], output_indices=positions)
        self.decode_runner = make_decode_runner(
            self.model, self.cache.pools, self.max_model_len, forward, self.stage_hooks
        )

    def use_attention(self, attention: PagedAttention) -> None:
        """Attend with this function instead of the backend's, in every step from now on."""
        self.backend = self.backend._replace(paged_attention=attention)
        logger.info("attention is computed by an override, the rest by the backend")
        self.decode_runner = None  # it would keep using the old one, or lengths read on the host

    def step_bytes(self) -> int:
        """Bytes of a GPU that its steps take besides weights and pool, without prompt log-probabilities."""
        return self._measure(self._config.max_sampling_rows) if self.device.type == "cuda" else 0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Executor`."""
        self.move(plan)
        self._end_stage("moves")
        if not plan.scheduled:
            return StepResult([])
        batch = self.build(plan.scheduled)
        self._end_stage("batch")
        logits = self.forward(batch)
        self._end_stage("forward")
        reports = self._prompt_logprobs(batch, logits)
        if batch.sampling_index is not None:
            logits = logits[batch.sampling_index]
        samples, errors = self.sample(batch, logits) if batch.sampling else ([], {})
        self._end_stage("sample")
        return StepResult(samples, reports, errors)

    def move(self, plan: StepPlan) -> None:
        """Swap out, swap in, copy: in this order (see `scheduling/plan.py`)."""
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)

    def _end_stage(self, name: str) -> None:
        for hook in self.stage_hooks:
            hook(name)

    def build(self, scheduled: list[ScheduledSequence]) -> Batch:
        """The tensors of a step."""
        return self.builder.build(scheduled)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, V] of `output_indices`, until the next step; all K/V are in the pool afterwards."""
        if self.decode_runner is not None and self.decode_runner.accepts(batch):
            try:
                return self.decode_runner(batch)
            except CaptureError as reason:
                logger.warning("enable_cuda_graphs has no effect; each step launches kernels: %s", reason)
                self.decode_runner = None
        return self.compute(batch)

    def sample(self, batch: Batch, logits: Tensor) -> tuple[list[Sample], dict[str, str]]:
        """A sample for each of `batch.sampling`, whose logits [., V] these are; see `find_errors`."""
        samples = self.sampler(logits, batch.sampling)
        return samples, find_errors(samples, batch.sampling, logits)

    def compute(self, batch: Batch) -> Tensor:
        """As `forward`, layer by layer."""
        # (Rows for log-probabilities of a prompt are not the last of their sequences.)
        uses_all = batch.prompts or len(batch.output_indices) == batch.input_ids.shape[1]
        context = PagedContext(
            pools=self.cache.pools,
            metadata=batch.metadata,
            positions=batch.positions[0],
            backend=self.backend,
            output_indices=None if uses_all else batch.output_indices,
            output_rows=batch.output_rows,
            end_stage=self._end_stage,
        )
        step = nullcontext() if self._states is None else self._states.step(batch)
        with step, set_forward_context(context):
            return call_model(self.model, batch.input_ids, batch.positions, batch.output_indices)[0]

    @property
    def _can_capture(self) -> bool:
        # (Other backends read lengths on the host; a graph would repeat those it was captured with.)
        return (
            self._config.enable_cuda_graphs
            and self.device.type == "cuda"
            and self.backend.name == "triton"
            and not self._is_recurrent
        )

    def _make_graph_runner(self) -> CUDAGraphRunner | None:
        config, device = self._config, self.device
        if not self._can_capture:
            return None
        # Longer contexts are cut at attention chunks, on the host.
        chunk_sizes = [spec.chunk_size for spec, _, _ in self.cache.pools.values() if spec.chunk_size]
        longest = min(self.max_model_len, self.num_blocks * self.block_size, *chunk_sizes)
        num_rows = config.max_sampling_rows
        capture = CUDAGraphCapture(device, num_rows)
        me = proxy(self)  # (a reference cycle would keep the pools alive after their last user)
        return CUDAGraphRunner(
            lambda batch: me.compute(batch), capture, num_rows, longest, self.block_size, device
        )

    @staticmethod
    def _prompt_logprobs(batch: Batch, logits: Tensor) -> dict[str, list[tuple[int, TopLogprobs]]]:
        """Per request, position and log-probabilities of the prompt tokens that the step's rows predict."""
        reports = {}
        for item, first in batch.prompts:
            sequence, num_tokens = item.sequence, num_predicted_prompt_tokens(item)
            position = item.start + 1  # a row predicts the token after its own
            token_ids = sequence.token_ids[position : position + num_tokens]
            rows, wanted = logits[first : first + num_tokens], sequence.request.params.prompt_logprobs
            found = []
            for i in range(0, num_tokens, LOGPROB_ROWS):
                part = slice(i, i + LOGPROB_ROWS)
                found += prompt_logprobs(rows[part], token_ids[part], wanted)
            reports[sequence.request.request_id] = list(enumerate(found, start=position))
        return reports
