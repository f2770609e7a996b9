"""The executor over a Hugging Face decoder: moves, one forward pass over a ragged batch, sampling.

    StepPlan -> swap out, swap in, copies -> Batch -> model -> logits [R, V] -> samples

Before the first step a probe pass of two tokens learns each layer's K/V shapes and refuses a model whose
layers do not all attend through the pool; then the pool is sized.
Paper: section 5 (implementation). Does NOT know: queues, why a plan is what it is, how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minipaged.config import EngineConfig
from minipaged.execution import loading
from minipaged.execution.attention import (
    LayerProbe,
    LayerSpec,
    PagedStep,
    UnsupportedModelError,
    attention_step,
    prepare,
)
from minipaged.execution.batch import Batch, BatchBuilder, num_predicted_prompt_tokens
from minipaged.execution.kv_cache import DEFAULT_CPU_MEMORY, KVCache, block_bytes, pool_size
from minipaged.kernels.dispatch import select_backend
from minipaged.scheduling.plan import Chunk, Sample, StepPlan, StepResult

TokenSampler = Callable[[Tensor, list[Chunk]], list[Sample]]
"""logits [R, V] and the R chunks they belong to -> one `Sample` each."""


class ModelRunner:
    """An `Executor` (see there) for one device.

    Args:
        model: a causal language model of transformers, in eval mode on its device; its attention
            implementation is switched to the pool's.
        config: the settings.
        sampler: chooses tokens from logits.

    Raises:
        UnsupportedModelError: the model would compute something else than its own attention.
        ConfigError: settings that this model cannot serve.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, sampler: TokenSampler) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._sampler = sampler
        self._text_config = loading.text_config(model)
        own_attention = model.config._attn_implementation
        try:
            prepare(model)
            self.max_model_len = loading.longest_sequence(self._text_config, config.max_model_len)
            specs = self._probe(config.block_size)
        except UnsupportedModelError as reason:
            model.set_attn_implementation(own_attention)
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}") from reason
        self.block_size = config.block_size
        self.block_bytes = block_bytes(specs, config.block_size)
        self.num_blocks, self.num_host_blocks = pool_size(
            config, self.block_bytes, self.max_model_len, self._available_bytes(config)
        )
        self.backend = select_backend(config.attention_backend, self.device)
        self.eos_token_ids = loading.end_of_text(model)
        self.cache = KVCache(specs, self.num_blocks, self.num_host_blocks, config.block_size, self.backend)
        self.builder = BatchBuilder(config.block_size, self.device)

    @classmethod
    def load(cls, name: str, config: EngineConfig, sampler: TokenSampler) -> ModelRunner:
        """A runner for a model directory or hub id, on the GPU if there is one.

        Raises:
            ModelLoadError: the model cannot be found or read.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loading.load_model(name, config.dtype, device), config, sampler)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see `Executor`."""
        self.cache.swap_out(plan.swap_out)
        self.cache.swap_in(plan.swap_in)
        self.cache.copy(plan.copies)
        if not plan.chunks:
            return StepResult([])
        batch = self.builder.build(plan.chunks)
        logits = self.forward(batch)
        prompt_logprobs = self._prompt_logprobs(batch, logits) if batch.prompts else None
        if not batch.sampling:
            return StepResult([], prompt_logprobs)
        if batch.sampling_index is not None:
            logits = logits[batch.sampling_index]
        return StepResult(self._sampler(logits, batch.sampling), prompt_logprobs)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, V] of `batch.logits_rows`; the K/V of all rows are in the pool afterwards."""
        step = PagedStep(self.cache.pools, batch.metadata, batch.positions[0], self.backend)
        with attention_step(step):
            return self._call(batch.input_ids, batch.positions, batch.logits_rows)[0]

    def _call(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids, position_ids=positions, use_cache=False, logits_to_keep=logits_rows
        ).logits

    @torch.inference_mode()
    def _probe(self, block_size: int, num_tokens: int = 2) -> dict[int, LayerSpec]:
        """One forward pass without a pool: which layers call the hook, with which shapes."""
        probe = LayerProbe(self._text_config)
        input_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)[None]
        with attention_step(probe):
            logits = self._call(input_ids, positions, positions[0, -1:])
        if logits.shape[1] != 1:
            raise UnsupportedModelError("it cannot compute the logits of chosen rows only")
        self.vocab_size = logits.shape[-1]
        silent = set(range(self._text_config.num_hidden_layers)) - set(probe.specs)
        if silent:
            raise UnsupportedModelError(f"layers {sorted(silent)} keep no K/V in the cache")
        for layer, spec in probe.specs.items():
            if spec.chunk_size is not None and spec.chunk_size % block_size:
                raise UnsupportedModelError(
                    f"block_size {block_size} does not divide the attention chunk of {spec.chunk_size} "
                    f"tokens of layer {layer}; choose one that does, for example 16"
                )
        return dict(sorted(probe.specs.items()))

    def _available_bytes(self, config: EngineConfig) -> int:
        return DEFAULT_CPU_MEMORY

    def _prompt_logprobs(self, batch: Batch, logits: Tensor) -> dict[str, list[tuple[int, dict[int, float]]]]:
        """Per request, (position, {token id: log-probability}) of the prompt tokens that the rows predict.

        The prompt's own token is always among them, and the `prompt_logprobs` most likely ones.
        """
        result = {}
        for chunk, first in batch.prompts:
            sequence, start, num_tokens = chunk.sequence, chunk.start, num_predicted_prompt_tokens(chunk)
            logprobs = torch.log_softmax(logits[first : first + num_tokens].float(), dim=-1)
            targets = sequence.token_ids[start + 1 : start + 1 + num_tokens].tolist()
            own = logprobs[range(num_tokens), targets].tolist()
            top = logprobs.topk(sequence.request.params.prompt_logprobs)
            result[sequence.request.request_id] = [
                (start + 1 + row, {targets[row]: own[row], **dict(zip(ids, values))})
                for row, (ids, values) in enumerate(zip(top.indices.tolist(), top.values.tolist()))
            ]
        return result
