"""The executor over a Hugging Face decoder: moves, one forward pass over a ragged batch, sampling.

    StepPlan -> swap out, swap in, copies -> Batch -> model -> logits [R, V] -> samples

First a probe pass of two tokens learns each layer's K/V shapes and refuses a model whose layers do not all
attend through the pool. Does NOT know: queues, why a plan is what it is, how tokens are chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.config import EngineConfig
from minipaged.decoding.sampling import Sampler, prompt_logprobs
from minipaged.execution import loading
from minipaged.execution.accel.cuda_graph import CudaRecorder, RecordingError
from minipaged.execution.accel.graph_decode import PaddedDecodes, replayed
from minipaged.execution.accel.packed_linear import can_pack, pack_linears
from minipaged.execution.attention import (
    LayerProbe,
    LayerSpec,
    PagedStep,
    UnsupportedModelError,
    attention_step,
    prepare,
)
from minipaged.execution.batch import Batch, BatchBuilder, num_predicted_prompt_tokens
from minipaged.execution.kv_cache import KVCache, block_bytes
from minipaged.execution.memory_budget import DEFAULT_CPU_MEMORY, gpu_budget, pool_size
from minipaged.kernels.dispatch import select_backend
from minipaged.scheduling import Sample, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.preemption import PreemptionCosts

logger = logging.getLogger(__name__)

TokenSampler = Callable[
    [Tensor, list[ScheduledSequence]], list[Sample]
]  # logits [R, V], R chunks -> one sample each


class ModelRunner:
    """An `Executor` (see there) for one device.

    Args:
        model: a causal language model of transformers, in eval mode on its device; its attention
            implementation is switched to the pool's.
        config: the settings.
        sampler: chooses tokens from logits; the default follows each request's parameters.

    Raises:
        UnsupportedModelError: the model would compute something else than its own attention.
        ConfigError: settings that this model cannot serve.
    """

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, sampler: TokenSampler | None = None
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._text_config = loading.text_config(model)
        own_attention = model.config._attn_implementation
        try:
            prepare(model)
            self.max_model_len = loading.longest_sequence(self._text_config, config.max_model_len)
            specs = self._probe(config.block_size)
        except UnsupportedModelError as reason:
            model.set_attn_implementation(own_attention)
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}") from reason
        self.backend = select_backend(config.attention_backend, self.device)
        self.block_size = config.block_size
        self.block_bytes = block_bytes(specs, config.block_size)
        self.num_blocks, self.num_host_blocks = pool_size(
            config, self.block_bytes, self.max_model_len, lambda: self._available_bytes(config)
        )
        self.eos_token_ids = loading.end_of_text(model)
        self._sampler = sampler or Sampler(self.eos_token_ids, config.seed, self.backend.greedy_tokens)
        self.cache = KVCache(specs, self.num_blocks, self.num_host_blocks, config.block_size, self.backend)
        self.builder = BatchBuilder(config.block_size, self.device)
        # (Other backends read lengths on the host; a graph would repeat those it was recorded with.)
        can_record = (
            config.enable_cuda_graphs and self.device.type == "cuda" and self.backend.name == "triton"
        )
        self.decodes = self._recorded_decodes(config) if can_record else None
        self.preemption_costs = PreemptionCosts.estimate(
            self.device.type, self.block_bytes, sum(weight.numel() for weight in model.parameters())
        )

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> ModelRunner:
        """A runner for a model directory or hub id, on the GPU if there is one.

        Raises:
            ModelLoadError: the model cannot be found or read.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        runner = cls(loading.load_model(name, config.dtype, device), config)
        if device.type == "cpu":
            runner.speed_up()
        return runner

    def speed_up(self) -> None:
        """Rebuild the model for the CPU: packed weights, fused layers. It serves nobody else afterwards."""
        if not can_pack():
            return
        if self.backend.name == "cpp":
            from minipaged.execution.accel.layer_fusion import fuse_layers

            rows = torch.arange(min(8, self.vocab_size, self.max_model_len))
            positions = rows * (self.max_model_len // len(rows))
            fuse_layers(self.model, lambda: self._call(rows[None], positions[None], rows))
        pack_linears(self.model)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Executor`."""
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)
        if not plan.scheduled:
            return StepResult([])
        batch = self.builder.build(plan.scheduled)
        logits = self.forward(batch)
        reports = self._prompt_logprobs(batch, logits) if batch.prompts else None
        if not batch.sampling:
            return StepResult([], reports)
        if batch.sampling_index is not None:
            logits = logits[batch.sampling_index]
        return StepResult(self._sampler(logits, batch.sampling), reports)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, V] of `batch.logits_rows`, until the next step; all K/V are in the pool afterwards."""
        if self.decodes is not None and self.decodes.accepts(batch):
            try:
                return self.decodes(batch)
            except RecordingError as reason:
                logger.warning("enable_cuda_graphs has no effect, steps are launched anew: %s", reason)
                self.decodes = None
        return self.compute(batch)

    def compute(self, batch: Batch) -> Tensor:
        """As `forward`, of the batch as it is, never recorded."""
        # (Rows for log-probabilities of a prompt are not the last of their sequences.)
        is_all = batch.prompts or len(batch.logits_rows) == batch.input_ids.shape[1]
        wanted = None if is_all else batch.logits_rows
        step = PagedStep(self.cache.pools, batch.metadata, batch.positions[0], self.backend, wanted)
        with attention_step(step):
            return self._call(batch.input_ids, batch.positions, batch.logits_rows)[0]

    def _call(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows
        ).logits

    def _probe(self, block_size: int) -> dict[int, LayerSpec]:
        """Which layers call the hook, with which shapes: one forward pass without a pool."""
        try:
            specs, logits = self._run_without_pool(num_tokens=2, num_rows=1)
        except UnsupportedModelError:
            raise
        except Exception as error:  # code of other people, which may rely on a mask or a cache
            raise UnsupportedModelError(
                f"it fails without mask and cache of its own: {loading.in_one_line(error)}"
            ) from error
        if logits.shape[0] != 1:
            raise UnsupportedModelError("it cannot compute the logits of chosen rows only")
        self.vocab_size = logits.shape[1]
        silent = set(range(self._text_config.num_hidden_layers)) - set(specs)
        if silent:
            raise UnsupportedModelError(f"layers {sorted(silent)} keep no K/V in the cache")
        for layer, spec in specs.items():
            if spec.chunk_size is not None and spec.chunk_size % block_size:
                raise UnsupportedModelError(
                    f"block_size {block_size} does not divide the attention chunk of {spec.chunk_size} "
                    f"tokens of layer {layer}; choose one that does, for example 16"
                )
        return specs

    @torch.inference_mode()
    def _run_without_pool(self, num_tokens: int, num_rows: int) -> tuple[dict[int, LayerSpec], Tensor]:
        """What the layers look like, and the logits [num_rows, V] (of no meaning)."""
        probe = LayerProbe(self._text_config)
        rows = torch.arange(num_tokens, device=self.device)
        with attention_step(probe):
            logits = self._call(
                torch.zeros_like(rows)[None], (rows % self.max_model_len)[None], rows[:num_rows]
            )
        return probe.specs, logits[0]

    def _recorded_decodes(self, config: EngineConfig) -> PaddedDecodes:
        # Longer contexts are cut at attention chunks, on the host.
        chunk_sizes = [spec.chunk_size for spec, _, _ in self.cache.pools.values() if spec.chunk_size]
        longest = min(self.max_model_len, self.num_blocks * self.block_size, *chunk_sizes)
        num_rows = min(config.max_num_batched_tokens, config.max_num_seqs)
        forward = replayed(self.compute, CudaRecorder(self.device, num_rows))
        return PaddedDecodes(forward, num_rows, longest, self.block_size, self.device)

    def _available_bytes(self, config: EngineConfig) -> int:
        """Bytes for the pool if the settings do not say: on a GPU, what the largest step leaves."""
        if self.device.type != "cuda":
            return DEFAULT_CPU_MEMORY
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        resting = torch.cuda.memory_allocated(self.device)
        num_tokens = config.max_num_batched_tokens
        _, logits = self._run_without_pool(num_tokens, min(num_tokens, config.max_num_seqs))
        torch.log_softmax(logits.float(), dim=-1)  # the sampler's share
        del logits
        peak = torch.cuda.max_memory_allocated(self.device) - resting
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return gpu_budget(total, free, peak, config.gpu_memory_utilization)

    @staticmethod
    def _prompt_logprobs(batch: Batch, logits: Tensor) -> dict[str, list[tuple[int, dict[int, float]]]]:
        """Per request, position and log-probabilities of the prompt tokens that the step's rows predict."""
        reports = {}
        for chunk, first in batch.prompts:
            sequence, num_tokens = chunk.sequence, num_predicted_prompt_tokens(chunk)
            position = chunk.start + 1  # a row predicts the token after its own
            reports[sequence.request.request_id] = list(
                enumerate(
                    prompt_logprobs(
                        logits[first : first + num_tokens],
                        sequence.token_ids[position : position + num_tokens],
                        sequence.request.params.prompt_logprobs,
                    ),
                    start=position,
                )
            )
        return reports
