"""What travels from rank 0 to the others: small, and enough to build the same batch."""

import random
from array import array

import pytest
import torch
import torch.distributed as dist

from minipaged.config import EngineConfig
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.engine import Engine
from minipaged.execution.batch import BatchBuilder
from minipaged.execution.distributed.group import FIRST_PART, Group
from minipaged.execution.distributed.message import PlanDecoder, PlanEncoder
from tests.engine.toy_model import ToyModel


class Watcher(ToyModel):
    """Computes plans as the toy model does, and compares what each plan and its decoded message make."""

    def __init__(self, num_places=32, **sizes):
        super().__init__(**sizes)
        self.encoder, self.decoder = PlanEncoder(num_places), PlanDecoder(self.block_size)
        self.own_builder, self.far_builder = BatchBuilder("cpu"), BatchBuilder("cpu")
        self.sent, self.seen = [], set()

    def execute(self, plan):
        message = self.encoder.encode(plan)
        self.sent.append((plan, message))
        decoded = self.decoder.decode(message)
        for kind in ("swap_out", "swap_in", "copies"):
            assert getattr(decoded, kind) == getattr(plan, kind)
            self.seen.update([kind] if getattr(plan, kind) else [])
        if plan.scheduled:
            self.check_same_batch(
                self.own_builder.build(plan.scheduled), self.far_builder.build(decoded.scheduled)
            )
        return super().execute(plan)

    def check_same_batch(self, own, far):
        for name in ("input_ids", "positions", "output_indices"):
            assert torch.equal(getattr(own, name), getattr(far, name)), name
        for name in ("slot_mapping", "query_start", "context_len"):
            assert torch.equal(getattr(own.metadata, name), getattr(far.metadata, name)), name
        for row, length in enumerate(own.metadata.context_len_list):
            count = -(-length // self.block_size)
            tables = own.metadata.block_tables[row, :count], far.metadata.block_tables[row, :count]
            assert torch.equal(*tables)
        assert bool(own.prompts) == bool(far.prompts)
        self.seen.update(["prompts"] if own.prompts else [])


def run(watcher, requests, **options):
    config = EngineConfig(block_size=watcher.block_size, disable_log_stats=True, **options)
    engine = Engine(watcher, config)
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished:
        engine.step()
    return engine


def prompts(count, longest, seed=0):
    source = random.Random(seed)
    return [[source.randrange(50) for _ in range(source.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_receivers_build_the_same_batches_through_preemption_forks_and_beams(mode):
    """Catches a table that is not sent again after a swap, a copy-on-write, a fork or a recomputation."""
    watcher = Watcher(num_places=9, num_blocks=24, num_host_blocks=24)
    kinds = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, n=3, max_tokens=12),
        BeamSearchParams(beam_width=3, max_tokens=9),
    ]
    requests = [(prompt, kinds[i % 3]) for i, prompt in enumerate(prompts(24, 20))]
    run(watcher, requests, preemption_mode=mode, max_num_seqs=9, max_num_batched_tokens=24)
    assert "copies" in watcher.seen
    assert ("swap_in" in watcher.seen) == (mode == "swap")


def test_rows_whose_prompt_log_probabilities_are_wanted_are_the_same_on_all_ranks():
    """Catches ranks that compute other output rows than rank 0, whose sums then do not match."""
    watcher = Watcher()
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    run(watcher, [(prompt, params) for prompt in prompts(4, 20)], max_num_batched_tokens=7)
    assert "prompts" in watcher.seen


def test_a_decode_takes_16_bytes_and_a_block_id_travels_once():
    """Catches whole block tables in every message."""
    watcher = Watcher(num_places=8, num_blocks=200)
    params = SamplingParams(temperature=0, max_tokens=60)
    run(watcher, [(list(range(17 + i)), params) for i in range(8)], enable_prefix_caching=False)
    decodes = [(plan, message) for plan, message in watcher.sent if plan.num_tokens == 8][1:]
    assert len(decodes) > 50
    changed = 0
    for plan, message in decodes:
        new = sum(s.start % watcher.block_size == 0 for s in plan.scheduled)
        assert message.itemsize * len(message) == 24 + 16 * len(plan.scheduled) + 16 * new
        changed += new
    assert changed > 100


def test_a_place_that_is_taken_over_sends_the_whole_table():
    """Catches a new sequence that inherits the blocks of the one whose place it takes."""
    watcher = Watcher(num_places=2, num_blocks=40)
    params = SamplingParams(temperature=0, max_tokens=5)
    run(watcher, [(prompt, params) for prompt in prompts(20, 15)], max_num_seqs=2)
    assert len(watcher.encoder._tables) == 2


def test_a_step_with_more_sequences_than_places_makes_places():
    """Catches two sequences of a step in one place: both would follow the table of the second."""
    watcher = Watcher(num_places=1)
    run(watcher, [(prompt, SamplingParams(temperature=0, max_tokens=5)) for prompt in prompts(6, 15)])
    assert len(watcher.encoder._tables) == 6


@pytest.mark.parametrize("length", [0, 1, FIRST_PART - 1, FIRST_PART, FIRST_PART + 1, 3 * FIRST_PART])
def test_a_message_of_any_length_arrives_whole(length, monkeypatch):
    """Catches the number at the seam of the two parts lost or sent twice, and parts of the message before."""
    sent, message = [], array("i", range(1, length + 1))
    ours, theirs = (object.__new__(Group) for _ in range(2))
    for group in (ours, theirs):
        group._control, group._buffer = None, torch.full((FIRST_PART,), -1, dtype=torch.int32)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: sent.append(tensor.clone()))
    ours.send(message)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: tensor.copy_(sent.pop(0)))
    assert theirs.receive() == list(message)
    assert sent == []
