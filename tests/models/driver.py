"""Runs a `ModelRunner` on hand-made plans: the tests decide who computes how many tokens in which step."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minipaged.config import EngineConfig
from minipaged.execution.model_runner import ModelRunner
from minipaged.memory import BlockAllocator, BlockTable
from minipaged.scheduling import Sample, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.request import Branch, Request, Sequence


def greedy(logits: Tensor, chunks: list[ScheduledSequence]) -> list[Sample]:
    """The most likely token of each row."""
    assert len(logits) == len(chunks)
    best = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
    return [Sample([token], [logprob]) for token, logprob in zip(best.indices.tolist(), best.values.tolist())]


class Driver:
    """A runner, its block pool and its sequences.

    Attributes:
        runner: its pools are full of NaN, so that reading what was not written shows.
    """

    def __init__(
        self, model: nn.Module, block_size: int = 4, num_blocks: int = 64, **settings: object
    ) -> None:
        config = EngineConfig(block_size=block_size, num_blocks=num_blocks, **settings)
        self.runner = ModelRunner(model, config, greedy)
        for _, keys, values in self.runner.cache.pools.values():
            keys.fill_(float("nan"))
            values.fill_(float("nan"))
        self.pool = BlockAllocator(num_blocks)
        self.steps = 0

    def add(self, token_ids: list[int], params: object = None) -> Sequence:
        """A new sequence, nothing of it computed."""
        table = BlockTable(self.pool, self.runner.block_size)
        request = Request(f"r{random.random()}", token_ids, None, params, self.runner.max_model_len, table)
        return request.sequences[0]

    def scheduled(self, parts: list[tuple[Sequence, int]]) -> list[ScheduledSequence]:
        """Chunks of the next `count` tokens of each sequence, with slots; the last token samples."""
        chunks = []
        for sequence, count in parts:
            sequence.table.append(count)
            start = sequence.num_computed_tokens
            sequence.num_computed_tokens += count
            chunks.append(ScheduledSequence(sequence, start, count, int(sequence.num_uncomputed_tokens == 0)))
        return chunks

    def execute(self, parts: list[tuple[Sequence, int]]) -> StepResult:
        """One step; the sampled tokens are appended."""
        self.steps += 1
        plan = StepPlan(self.steps, self.scheduled(parts))
        result = self.runner.execute(plan)
        sampling = [chunk.sequence for chunk in plan.scheduled if chunk.num_candidates]
        assert len(sampling) == len(result.samples)
        for sequence, sample in zip(sampling, result.samples):
            sequence.append(Branch(sequence, sample.token_ids[0], sample.logprobs[0]))
        return result

    @torch.inference_mode()
    def logits(self, parts: list[tuple[Sequence, int]]) -> list[Tensor]:
        """One step whose logits are all kept: per part [count, V]."""
        batch = self.runner.builder.build(self.scheduled(parts))
        rows = torch.arange(batch.input_ids.shape[1])
        batch = batch._replace(output_indices=rows, output_rows=rows.tolist())
        return list(self.runner.forward(batch).clone().split([count for _, count in parts]))


@torch.inference_mode()
def own_logits(model: nn.Module, token_ids: list[int]) -> Tensor:
    """The logits [T, V] of a sequence that the model computes by itself, without a pool."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def own_tokens(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens with which transformers' greedy decoding goes on."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": count}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


CUTS = [
    (0, [3, 2, 5, 1, 1, 1, 1, 7]),  # chunks, decodes, and a chunk again (recompute after preemption)
    (1, [14, 1, 1, 1, 1, 1]),  # a whole prompt, then decodes
    (2, [4, 1, 1, 6, 13]),
]
"""From which step on a sequence is computed, and in which pieces: the cuts fall before, on and after the ends
of blocks of 4, of windows of 5 to 7 and of attention chunks of 8."""


def logits_in_cuts(driver: Driver, cuts: list[tuple[int, list[int]]]) -> list[tuple[list[int], Tensor]]:
    """Of each random sequence its tokens and their logits [T, V], computed as `schedule(cuts)` says."""
    size = driver.runner.vocab_size
    token_ids = [random_tokens(sum(pieces), size, seed) for seed, (_, pieces) in enumerate(cuts)]
    sequences = [driver.add(ids) for ids in token_ids]
    computed: list[list[Tensor]] = [[] for _ in sequences]
    for parts in schedule(cuts):
        logits = driver.logits([(sequences[who], count) for who, count in parts])
        for (who, _), part in zip(parts, logits):
            computed[who].append(part)
    return list(zip(token_ids, map(torch.cat, computed)))


def random_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids from 2 on."""
    source = random.Random(seed)
    return [source.randrange(2, vocab_size) for _ in range(length)]


def schedule(cuts: list[tuple[int, list[int]]]) -> Iterator[list[tuple[int, int]]]:
    """Steps of (who, count): sequence i is computed in pieces `cuts[i][1]` from step `cuts[i][0]` on."""
    last = max(first + len(pieces) for first, pieces in cuts)
    for step in range(last):
        yield [
            (who, pieces[step - first])
            for who, (first, pieces) in enumerate(cuts)
            if 0 <= step - first < len(pieces)
        ]
