"""Decoding methods without an engine: the loop that a scheduler would run, with nothing paged. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minipaged.memory import BlockAllocator, BlockTable
from minipaged.scheduling import ScheduledSequence
from minipaged.scheduling.request import Branch, Request, Sequence

if TYPE_CHECKING:
    import torch

    from minipaged.decoding.sampling import Sampler


def make_request(prompt, method, params, max_num_tokens=10_000, arrival=0) -> Request:
    request = Request("r", prompt, method, params, max_num_tokens, BlockTable(BlockAllocator(1), 1))
    request.arrival = arrival
    return request


def make_sequence(prompt, output=(), params=None, index=0, max_num_tokens=10_000, arrival=0) -> Sequence:
    request = make_request(prompt, None, params, max_num_tokens, arrival)
    sequence = request.sequences[0]
    sequence.index = index
    for token_id in output:
        sequence.append(Branch(sequence, token_id, -1.0))
    return sequence


def schedule(sequence: Sequence, num_candidates: int = 1) -> ScheduledSequence:
    return ScheduledSequence(sequence, sequence.num_tokens - 1, 1, num_candidates)


def apply(request: Request, branches: list[Branch]) -> None:
    """What the scheduler makes of branches, without blocks: everybody forks, parents are dropped."""
    request.sequences = []
    for branch in branches:
        child = branch.parent.fork(branch.parent.table)
        child.append(branch)
        (request.sequences if branch.finish_reason is None else request.completions).append(child)


def decode(
    logits_of: Callable[[list[list[int]]], torch.Tensor],
    requests: list[Request],
    sampler: Sampler,
    max_steps: int = 200,
) -> None:
    """Run requests together until all are finished; `logits_of(token lists)` is [sequences, vocab]."""
    for _ in range(max_steps):
        alive = [request for request in requests if request.sequences]
        if not alive:
            return
        scheduled = [schedule(s, r.method.num_candidates(r)) for r in alive for s in r.sequences]
        samples = sampler(logits_of([list(c.sequence.token_ids) for c in scheduled]), scheduled)
        for request in alive:
            count = len(request.sequences)
            own, samples = samples[:count], samples[count:]
            apply(request, request.method.advance(request, own))
    raise AssertionError(f"still alive after {max_steps} steps: {requests}")
