"""A smaller model that drafts for a larger one, the target model (Leviathan et al., arXiv 2211.17192).

It has a pool of its own, and a block table for each sequence that it follows:

    text     The cat | sat          the table has the K/V of "The cat sat"
    draft    The cat | sat on it    two steps of the draft model
    text     The cat | sat on a     "it" was rejected: `truncate`, then compute "a" and draft on

A text that has ended leaves its full blocks in a prefix cache for the next turn of a chat.

A draft token is sampled with the request's own parameters and with the noise that the text's token will be
sampled with (`decoding/noise.py`), so that the two agree more often than independent samples would.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

from minipaged.config import DRAFT_ROWS, ConfigError, EngineConfig
from minipaged.execution.executor import Executor
from minipaged.memory import BlockAllocator, BlockTable, PrefixCache
from minipaged.scheduling import ScheduledSequence, StepPlan
from minipaged.scheduling.request import Sequence

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

POOL_MEMORY = 1 << 30
"""Bytes of the draft model's pool."""


@dataclass(slots=True)
class _Reading:
    """What the draft model has computed of one sequence."""

    owner: ref[Sequence]
    table: BlockTable
    salt: str  # only texts with the same one share blocks
    token_ids: array[int] = field(default_factory=lambda: array("i"))  # its text at that time, then drafts
    num_text: int = 0  # tokens of the text
    num_computed: int = 0  # tokens whose K/V are in the table
    is_followed: bool = False  # by the draft being made


class DraftModel:
    """A `Drafter` over an executor.

    Args:
        runner: the draft model; its vocabulary is the target model's.
        max_num_batched_tokens: of one of its steps; a longer prompt takes several.
        tokenizer: the draft model's own, if it has one.
        name: its directory or hub id, for messages.
        enable_prefix_caching: whether common prefixes of texts are computed once.
    """

    def __init__(
        self,
        runner: Executor,
        max_num_batched_tokens: int,
        tokenizer: Any = None,
        name: str = "",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.name = name
        self.pool = PrefixCache(BlockAllocator(runner.num_blocks), runner.block_size)
        self._keeps_blocks = enable_prefix_caching
        self.max_num_batched_tokens = max_num_batched_tokens
        self.room: Tensor | None = None
        """On a GPU: what its steps take, kept free until the target model's pool is allocated."""
        self._has_failed = False
        self._readings: dict[int, _Reading] = {}  # by id of the sequence, the least recently used first

    @classmethod
    def load(cls, name: str, config: EngineConfig) -> DraftModel:
        """The model of a directory or hub id, for a target model with these settings.

        It is loaded before the target model, whose pool takes what a GPU has left.

        Raises ConfigError if it cannot be loaded, or has recurrent layers, which cannot undo a token.
        """
        import torch

        from minipaged.execution import loading, model_config
        from minipaged.execution.model_runner import ModelRunner

        own = replace(
            config,
            speculative_model=None,
            num_speculative_tokens=0,
            num_blocks=None,
            kv_cache_memory=POOL_MEMORY,
            swap_space=0,
            max_num_seqs=DRAFT_ROWS,
            revision=None,
        )
        try:
            model = loading.load_model(name, own, loading.find_device(own.device))
            trained = model_config.trained_length(model_config.text_config(model))
            longest = min(filter(None, (trained, config.max_model_len)), default=None)
            runner = ModelRunner.optimized(model, replace(own, max_model_len=longest))
        except ValueError as error:
            raise ConfigError(f"speculative_model is {name!r}: {error}") from error
        if runner.kept_states is not None:
            raise ConfigError(
                f"speculative_model is {name!r}, whose recurrent layers cannot take a wrong token back; give "
                "a model whose layers all attend"
            )
        try:
            tokenizer = loading.load_tokenizer(name, own, must_exist=True)
        except loading.ModelLoadError:
            tokenizer = None
        draft = cls(runner, own.max_num_batched_tokens, tokenizer, name, own.enable_prefix_caching)
        draft.room = torch.empty(runner.step_bytes(), dtype=torch.uint8, device=runner.device)
        return draft

    def draft_for(self, executor: Executor, tokenizer: Any) -> None:
        """Draft for the target model behind an executor, with this tokenizer (None: it has none).

        Raises ConfigError if the two have different vocabularies. Logs a warning where drafts cannot help.
        """
        import torch

        self.room = None
        torch.cuda.empty_cache()
        subject = f"speculative_model is {self.name!r}, which"
        if None not in (tokenizer, self.tokenizer) and tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(f"{subject} has another vocabulary; give a smaller model of the same family")
        if tokenizer is not None and self.tokenizer is None:
            logger.warning("%s has no tokenizer; make sure that its vocabulary is the model's", subject)
        runner: Any = self.runner
        if runner.max_model_len < executor.max_model_len:
            message = "%s reads %d tokens; longer texts (max_model_len is %d) get no draft tokens"
            logger.warning(message, subject, runner.max_model_len, executor.max_model_len)
        if runner.preemption_costs.seconds_per_token >= executor.preemption_costs.seconds_per_token:
            logger.warning("%s takes at least as long for a token as the model; give a smaller one", subject)
        sampler, vocab_size = runner.sampler, executor.vocab_size

        def sample(logits: Tensor, scheduled: list[ScheduledSequence]) -> Any:
            # (Vocabularies of a family differ in how far they are padded.)
            logits = logits[:, :vocab_size]
            if missing := vocab_size - logits.shape[1]:
                logits = torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
            return sampler(logits, scheduled)

        runner.sampler = sample

    def draft(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        """See `Drafter`. If the model fails, there is no draft."""
        try:
            return self._draft(sequences, counts)
        except Exception as error:
            if not self._has_failed:
                logger.warning("the draft model fails, so there are no drafts: %s", error, exc_info=True)
            self._has_failed = True
            for reading in self._readings.values():
                reading.table.free()
            self._readings = {}
            return [[] for _ in sequences]

    def _draft(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        self._forget_ended()
        copies = [self._follow(sequence, count) for sequence, count in zip(sequences, counts)]
        left, chunks = self.max_num_batched_tokens, []
        for copy in filter(None, copies):
            # (The rest of a long prompt is computed with the next drafts.)
            if count := min(copy.num_uncomputed_tokens, left):
                chunks.append((copy, count, count == copy.num_uncomputed_tokens))
                left -= count
        while chunks:
            self._compute(chunks)
            chunks = [
                (copy, 1, True)
                for sequence, copy, count in zip(sequences, copies, counts)
                if copy is not None and copy.num_uncomputed_tokens == 1
                if copy.num_tokens < sequence.num_tokens + count
            ]
        return [
            [] if copy is None else self._remember(sequence, copy)
            for sequence, copy in zip(sequences, copies)
        ]

    def _remember(self, sequence: Sequence, copy: Sequence) -> list[int]:
        """Keep what was computed of a sequence. Returns the draft."""
        reading, num_text = self._readings[id(sequence)], len(sequence.token_ids)
        reading.token_ids, reading.num_text = copy.token_ids, num_text
        reading.num_computed = copy.num_computed_tokens
        return list(copy.token_ids[num_text:])

    def _forget_ended(self) -> None:
        for key, reading in list(self._readings.items()):
            reading.is_followed = False
            owner = reading.owner()
            if owner is None or owner.request.is_finished:
                self._release(self._readings.pop(key))

    def _follow(self, sequence: Sequence, count: int) -> Sequence | None:
        """A copy of the sequence over a table of this pool, with at least the newest token uncomputed; None
        if the context length is too short, or the pool has no blocks."""
        text, runner = sequence.token_ids, self.runner
        if len(text) + count > runner.max_model_len:
            return None
        reading = self._readings.pop(id(sequence), None)
        if reading is None:
            table = BlockTable(self.pool, runner.block_size)
            reading = _Reading(ref(sequence), table, sequence.cache_salt)
        self._readings[id(sequence)] = reading  # the most recently used
        if not reading.table.blocks:
            self._find(reading, text[:-1])
        known = reading.num_text
        while known < min(len(text), len(reading.token_ids)) and text[known] == reading.token_ids[known]:
            known += 1
        copy = Sequence(sequence.request, text[:], reading.table, sequence.index)
        reading.num_computed = min(known, reading.num_computed, len(text) - 1)
        copy.num_computed_tokens = reading.num_computed
        reading.table.truncate(reading.num_computed)
        if max(text[copy.num_computed_tokens :]) >= runner.vocab_size or not self._make_room(copy, count):
            return None
        reading.is_followed = True
        return copy

    def _find(self, reading: _Reading, text: array[int]) -> None:
        """Begin with this text's blocks in the prefix cache."""
        hashes: list[int] = []
        self.pool.extend_hashes(hashes, text, reading.salt)
        reading.table.share(self.pool.match(hashes, text, reading.salt))
        reading.token_ids, reading.num_text = text, len(text)
        reading.num_computed = reading.table.num_tokens

    def _release(self, reading: _Reading) -> None:
        """Free its blocks; the full ones stay in the prefix cache until they are evicted."""
        if self._keeps_blocks:
            hashes: list[int] = []
            entry: Any = reading.salt
            self.pool.extend_hashes(hashes, reading.token_ids[: reading.num_computed], reading.salt)
            for i, (block, chain_hash) in enumerate(zip(reading.table.blocks, hashes)):
                tokens = reading.token_ids[i * self.pool.block_size : (i + 1) * self.pool.block_size]
                entry = self.pool.register(block, chain_hash, tokens, entry)
            self.pool.commit()  # (they are computed)
        reading.table.free()

    def _make_room(self, copy: Sequence, count: int) -> bool:
        """Allocate the blocks of a draft, if need be from the least recently used sequences. Returns whether
        there were enough."""
        needed = copy.table.blocks_to_append(copy.num_uncomputed_tokens + count - 1)
        for reading in self._readings.values():
            if needed <= self.pool.num_free:
                break
            if not reading.is_followed and reading.table is not copy.table:
                self._release(reading)
        if needed > self.pool.num_free:
            return False
        copy.table.preallocate(needed)
        return True

    def _compute(self, chunks: list[tuple[Sequence, int, bool]]) -> None:
        """Run one step: `count` tokens of each copy; if it drafts, its next token is appended."""
        scheduled = []
        for copy, count, drafts in chunks:
            copy.table.append(count)
            scheduled.append(ScheduledSequence(copy, copy.num_computed_tokens, count, int(drafts)))
        samples = iter(self.runner.execute(StepPlan(0, scheduled)).samples)
        for copy, count, drafts in chunks:
            copy.num_computed_tokens += count
            if drafts:
                copy.token_ids.append(next(samples).token_ids[0])
