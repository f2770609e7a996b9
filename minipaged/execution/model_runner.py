"""The executor over a Hugging Face decoder: moves, one forward pass over a ragged batch, sampling.

    StepPlan -> swap out, swap in, copies -> Batch -> model -> logits [R, V] -> samples

When it is built, probe passes of a few tokens find out each layer's K/V shapes and refuse a model whose
layers do not all attend through the pool.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.config import EngineConfig
from minipaged.decoding.sampling import Sampler, find_errors, prompt_logprobs, take_memory
from minipaged.execution import loading
from minipaged.execution.accel.cuda_graph import CaptureError, CUDAGraphCapture, CUDAGraphRunner
from minipaged.execution.accel.optimize import optimize
from minipaged.execution.attention import (
    LayerSpec,
    PagedContext,
    ProbeContext,
    UnsupportedModelError,
    prepare,
    set_forward_context,
)
from minipaged.execution.batch import Batch, BatchBuilder, num_predicted_prompt_tokens
from minipaged.execution.kv_cache import DEFAULT_CPU_MEMORY, KVCache, block_bytes, gpu_budget, pool_size
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
        UnsupportedModelError: the model would compute something else than its own attention.
        ConfigError: settings that this model cannot serve.
    """

    layers: range | None = None  # those that it computes, if others compute the rest

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, sampler: TokenSampler | None = None
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        # Called with the name of each stage of a step as it ends: "moves", "batch", "forward", "sample"; for
        # each layer of the forward pass "forward" (up to its attention), "write_kv" and "attention".
        self.stage_hooks: list[Callable[[str], None]] = []
        self._config = config
        self._text_config = loading.text_config(model)
        own_attention = model.config._attn_implementation
        try:
            prepare(model)
            self.max_model_len = loading.longest_sequence(self._text_config, config.max_model_len)
            specs = self._specs = self._probe()
        except UnsupportedModelError as reason:
            model.set_attn_implementation(own_attention)
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}") from reason
        vars(model.config)["pad_token_id"] = None  # (else GPT-2 looks for it in each step)
        self.backend = select_backend(config.attention_backend, self.device)
        self.block_size = config.block_size
        self.block_bytes = block_bytes(specs, config.block_size)
        self.num_blocks, self.num_host_blocks = pool_size(
            config, self.block_bytes, self.max_model_len, self._available_bytes
        )
        self.eos_token_ids = loading.end_of_text(model, self.vocab_size)
        self.sampler = sampler or Sampler(self.eos_token_ids, config.seed, self.backend.greedy_tokens)
        self.cache = KVCache(specs, self.num_blocks, self.num_host_blocks, config.block_size, self.backend)
        self.builder = BatchBuilder(self.device)
        self.decode_runner: CUDAGraphRunner | DecodeRunner | None = self._make_graph_runner()
        self.preemption_costs = PreemptionCosts.estimate(
            self.device.type, self.block_bytes, sum(weight.numel() for weight in model.parameters())
        )

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> ModelRunner:
        """A runner for a model directory or hub id; may raise ModelLoadError or ConfigError."""
        device = loading.find_device(config.device)
        runner = cls(loading.load_model(name, config, device), config)
        runner.optimize()
        if runner.backend.name == "cpp":
            runner.use_one_call()
        return runner

    def optimize(self) -> None:
        """Rewrite the model for speed, quantized if asked; nobody else can use it then."""
        rows = torch.arange(min(8, self.vocab_size, self.max_model_len), device=self.device)
        positions = rows * (self.max_model_len // len(rows))
        run = partial(self._call, rows[None], positions[None], rows)
        optimize(self.model, run, self.backend, self._config.quantization)

    def use_one_call(self) -> None:
        """Run decodes of few rows in one call of C++ from now on, if the optimized model is of that kind."""
        from minipaged.execution.accel.decode_runner import make_decode_runner  # loads C++

        positions = torch.arange(2)
        forward = partial(self._call, positions=positions[None], output_indices=positions)
        self.decode_runner = make_decode_runner(
            self.model, self.cache.pools, self.max_model_len, forward, self.stage_hooks
        )

    def use_attention(self, attention: PagedAttention) -> None:
        """Attend with this function instead of the backend's, in every step from now on."""
        self.backend = self.backend._replace(paged_attention=attention)
        logger.info("attention is computed by an override, the rest by the backend")
        self.decode_runner = None  # it would go on with the old one, or with lengths read on the host

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Executor`."""
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)
        self._end_stage("moves")
        if not plan.scheduled:
            return StepResult([])
        batch = self.builder.build(plan.scheduled)
        self._end_stage("batch")
        logits = self.forward(batch)
        self._end_stage("forward")
        reports = self._prompt_logprobs(batch, logits) if batch.prompts else None
        if batch.sampling_index is not None:
            logits = logits[batch.sampling_index]
        samples = self.sampler(logits, batch.sampling) if batch.sampling else []
        errors = find_errors(samples, batch.sampling, logits)
        self._end_stage("sample")
        return StepResult(samples, reports, errors)

    def _end_stage(self, name: str) -> None:
        for hook in self.stage_hooks:
            hook(name)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, V] of `output_indices`, until the next step; all K/V are in the pool afterwards."""
        if self.decode_runner is not None and self.decode_runner.accepts(batch):
            try:
                return self.decode_runner(batch)
            except CaptureError as reason:
                logger.warning("enable_cuda_graphs has no effect; each step launches kernels: %s", reason)
                self.decode_runner = None
        return self.compute(batch)

    def compute(self, batch: Batch) -> Tensor:
        """As `forward`, layer by layer."""
        # (Rows for log-probabilities of a prompt are not the last of their sequences.)
        uses_all = batch.prompts or len(batch.output_indices) == batch.input_ids.shape[1]
        wanted = None if uses_all else batch.output_indices
        step = self.cache.pools, batch.metadata, batch.positions[0]
        context = PagedContext(*step, self.backend, wanted, batch.output_rows, self._end_stage)
        with set_forward_context(context):
            return self._call(batch.input_ids, batch.positions, batch.output_indices)[0]

    def _call(self, input_ids: Tensor, positions: Tensor | None, output_indices: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=output_indices
        ).logits

    def _probe(self) -> dict[int, LayerSpec]:
        """Which layers call the hook, with which shapes: forward passes without a pool."""
        num_layers = getattr(self._text_config, "num_hidden_layers", 1)
        if num_layers < 1:
            raise UnsupportedModelError(f"num_hidden_layers is {num_layers}; give at least 1")
        try:
            specs, logits = self._run_without_pool([0, 0], num_outputs=1)
            if logits.shape[0] != 1:
                raise UnsupportedModelError("it cannot compute the logits of chosen rows only")
            self.vocab_size = logits.shape[1]
            _, after_another = self._run_without_pool([self.vocab_size - 1, 0], num_outputs=1)
            _, own_positions = self._run_without_pool([0, 0], num_outputs=1, from_zero=False)
        except UnsupportedModelError:
            raise
        except Exception as error:  # code of other people, which may rely on a mask or a cache
            raise UnsupportedModelError(loading.why_forward_failed(error, self._text_config)) from error
        # Attention answered with zeros, so what is left of an earlier token went another way.
        if _differ(logits, after_another):
            what = "a recurrent state" if getattr(self.model, "_is_stateful", False) else "other token mixing"
            raise UnsupportedModelError(f"it has {what} besides the attention that can be replaced")
        if _differ(logits, own_positions):
            raise UnsupportedModelError("its positions do not start at 0")
        silent = sorted(set(self.layers or range(num_layers)) - set(specs))
        if silent:
            raise UnsupportedModelError(f"layers {silent} keep no K/V in the cache")
        block_size = self._config.block_size
        for layer, spec in specs.items():
            if spec.chunk_size is not None and spec.chunk_size % block_size:
                fits = max(size for size in range(1, block_size) if spec.chunk_size % size == 0)
                raise UnsupportedModelError(
                    f"block_size {block_size} does not divide the attention chunk of {spec.chunk_size} "
                    f"tokens of layer {layer}; choose one that does, for example {fits}"
                )
        return specs

    @torch.inference_mode()
    def _run_without_pool(
        self, token_ids: list[int], num_outputs: int, from_zero: bool = True
    ) -> tuple[dict[int, LayerSpec], Tensor]:
        """What the layers look like, and logits [num_outputs, V] with zeros for attention."""
        probe = ProbeContext(self._text_config)
        rows = torch.arange(len(token_ids), device=self.device)
        with set_forward_context(probe):
            positions = (rows % self.max_model_len)[None] if from_zero else None
            input_ids = torch.tensor([token_ids], device=self.device)
            logits = self._call(input_ids, positions, rows[len(rows) - num_outputs :])
        return probe.specs, logits[0]

    @property
    def _can_capture(self) -> bool:
        # (Other backends read lengths on the host; a graph would repeat those it was captured with.)
        return (
            self._config.enable_cuda_graphs and self.device.type == "cuda" and self.backend.name == "triton"
        )

    def _make_graph_runner(self) -> CUDAGraphRunner | None:
        config, device = self._config, self.device
        if not self._can_capture:
            return None
        # Longer contexts are cut at attention chunks, on the host.
        chunk_sizes = [spec.chunk_size for spec, _, _ in self.cache.pools.values() if spec.chunk_size]
        longest = min(self.max_model_len, self.num_blocks * self.block_size, *chunk_sizes)
        num_rows = min(config.max_num_batched_tokens, config.max_num_seqs)
        capture = CUDAGraphCapture(device, num_rows)
        me = proxy(self)  # (a reference cycle would keep the pools alive after their last user)
        return CUDAGraphRunner(
            lambda batch: me.compute(batch), capture, num_rows, longest, self.block_size, device
        )

    def _available_bytes(self) -> int:
        """Bytes for the pool if the settings do not say: on a GPU, what the largest step leaves."""
        if self.device.type != "cuda":
            return DEFAULT_CPU_MEMORY
        gc.collect()  # of an engine that nobody holds any more
        torch.cuda.empty_cache()
        num_tokens = self._config.max_num_batched_tokens
        num_decodes = min(num_tokens, self._config.max_num_seqs)
        peaks = []
        for count in (num_decodes, num_tokens):
            torch.cuda.reset_peak_memory_stats(self.device)
            resting = torch.cuda.memory_allocated(self.device)
            _, logits = self._run_without_pool([0] * count, count)  # prompt_logprobs ask for all rows' logits
            take_memory(logits[:num_decodes])
            del logits
            peaks.append(torch.cuda.max_memory_allocated(self.device) - resting)
        split_bytes = self._split_bytes(num_decodes)  # of the decodes in either kind of step
        decode, largest = (peak + split_bytes for peak in peaks)
        # A pool of captured decodes keeps its memory; without graphs the two kinds of step take turns.
        peak = decode + largest if self._can_capture else max(decode, largest)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return gpu_budget(total, free, peak, self._config.gpu_memory_utilization)

    def _split_bytes(self, num_decodes: int) -> int:
        """Bytes of the largest layer's partial results in a step of decodes, each as long as may be."""
        if self.backend.name != "triton":
            return 0
        from minipaged.kernels.triton.config import architecture_of, decode_config, split_bytes

        architecture, num_heads = architecture_of(self.device), self._text_config.num_attention_heads
        return max(
            split_bytes(
                decode_config(architecture, max(spec.key_dim, spec.value_dim), spec.dtype),
                *(num_decodes, num_heads, spec.value_dim, self.max_model_len),
            )
            for spec in self._specs.values()
        )

    @staticmethod
    def _prompt_logprobs(batch: Batch, logits: Tensor) -> dict[str, list[tuple[int, TopLogprobs]]]:
        """Per request, position and log-probabilities of the prompt tokens that the step's rows predict."""
        reports = {}
        for item, first in batch.prompts:
            sequence, num_tokens = item.sequence, num_predicted_prompt_tokens(item)
            position = item.start + 1  # a row predicts the token after its own
            token_ids = sequence.token_ids[position : position + num_tokens]
            wanted = sequence.request.params.prompt_logprobs
            found = []
            for i in range(0, num_tokens, LOGPROB_ROWS):
                count = min(LOGPROB_ROWS, num_tokens - i)
                rows = logits[first + i : first + i + count]
                found += prompt_logprobs(rows, token_ids[i : i + count], wanted)
            reports[sequence.request.request_id] = list(enumerate(found, start=position))
        return reports


def _differ(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() > 1e-3 * expected.abs().max())
