"""Parallel sampling: n samples of one prompt (paper, section 4.4, Fig. 8)."""

from dataclasses import replace

import pytest

from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.scheduling import Sample
from tests.concepts.decoding_driver import make_request
from tests.toy import ToyEngine, alone, toy_scheduler


def sampling(n, stop_token_ids=(), max_tokens=8):
    """The project's own method; the toy model takes the place of the sampler."""
    params = SamplingParams(
        n=n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stop_token_ids)
    )
    return SamplingMethod(params, StopChecker(params, ()))


def held(engine):
    return engine.scheduler.kv.num_used


def test_figure_8_two_samples_share_the_prompt_and_the_first_writer_copies_its_last_block():
    """Catches samples with a copy of the prompt each. Blocks of 4, "Four score and seven years ago our"."""
    engine = ToyEngine(toy_scheduler(order=[7, 1, 3]))
    request = engine.add(range(7), 4, sampling(2))
    engine.step()
    assert [sequence.table.blocks for sequence in request.sequences] == [[7, 1], [7, 1]]
    assert engine.step().copies == [(1, 3)]
    assert [sequence.table.blocks for sequence in request.sequences] == [[7, 3], [7, 1]]


def test_the_prompt_is_computed_once():
    """Catches a prompt that is computed once per sample."""
    engine = ToyEngine(toy_scheduler())
    engine.add(range(10), 4, sampling(5))
    assert [s.num_tokens for s in engine.step().scheduled] == [10]
    engine.run()
    assert engine.executor.num_tokens_computed == 10 + 5 * 3


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_last_block_of_the_prompt_is_copied_for_all_samples_but_one(n):
    """Catches copies of full blocks, and a copy whose source is then thrown away. Blocks of 4,
    a prompt of 7."""
    engine = ToyEngine(toy_scheduler())
    request = engine.add(range(7), 4, sampling(n))
    assert engine.step().copies == []
    assert held(engine) == 2
    assert len(engine.step().copies) == n - 1
    assert held(engine) == 1 + n
    assert len({sequence.table.blocks[0] for sequence in request.sequences}) == 1
    engine.run()
    assert engine.executor.num_copies == n - 1


def test_a_sample_goes_on_in_place():
    """Catches a fork for every token: the blocks that page growth had given to the sample would be lost."""
    engine = ToyEngine(toy_scheduler())
    request = engine.add(range(7), 9, sampling(3))
    engine.step()
    before = request.sequences[:]
    engine.step()
    assert request.sequences == before


def test_each_sequence_has_one_sample_in_a_step():
    """Catches a decoding method that is given its neighbour's tokens."""

    class Counting(SamplingMethod):
        def advance(self, request, samples):
            assert len(samples) == len(request.sequences)
            return super().advance(request, samples)

    engine = ToyEngine(toy_scheduler())
    for n in (1, 3, 2):
        params = sampling(n).params
        engine.add(range(3), 4, Counting(params, StopChecker(params, ())))
    engine.run()


def test_a_prompt_of_full_blocks_is_never_copied():
    """Catches a copy of a block that nobody writes to."""
    engine = ToyEngine(toy_scheduler())
    engine.add(range(8), 6, sampling(4))
    engine.run()
    assert engine.executor.num_copies == 0


def test_nothing_is_copied_before_it_is_written():
    """Catches a copy at the fork: sample 2 may end before it writes anything."""
    engine = ToyEngine(toy_scheduler())
    engine.add(range(7), 1, sampling(4))
    engine.run()
    assert engine.executor.num_copies == 0


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_each_sample_goes_its_own_way(n, block_size, caching):
    """Catches two samples that write to one block, or have one number and so one random stream."""
    engine = ToyEngine(toy_scheduler(block_size=block_size, caching=caching))
    request = engine.add(range(7), 8, sampling(n))
    (got,) = engine.run()
    assert got == alone(range(7), 8, sampling(n))
    assert len({tuple(sample) for sample in got}) == n
    assert sorted(c.index for c in request.completions) == list(range(n))


def test_samples_that_end_free_their_own_blocks_only():
    """Catches a prompt that is freed with the first sample that stops."""
    prompt = range(7)
    first_tokens = [sample[0] for sample in alone(prompt, 8, sampling(4))]
    method = sampling(4, stop_token_ids=first_tokens[1:2])
    engine = ToyEngine(toy_scheduler())
    request = engine.add(prompt, 8, method)
    engine.step()
    assert [c.output_token_ids for c in request.completions] == [first_tokens[1:2]]
    assert [s.index for s in request.sequences] == [0, 2, 3]
    assert engine.run() == engine.alone()


def test_all_samples_may_end_at_the_first_token():
    """Catches a request without a live sequence that is scheduled once more."""
    first_tokens = [sample[0] for sample in alone(range(7), 8, sampling(3))]
    engine = ToyEngine(toy_scheduler())
    request = engine.add(range(7), 8, sampling(3, stop_token_ids=first_tokens))
    engine.step()
    assert request.is_finished
    assert [c.finish_reason for c in request.completions] == ["stop"] * 3
    assert engine.run() == [[[token] for token in first_tokens]]


def test_sharing_saves_what_the_paper_counts():
    """Catches samples that share nothing: 6 samples over a prompt of 64 tokens and 16 of output."""
    engine = ToyEngine(toy_scheduler(200, 4, budget=200))
    engine.add(range(64), 16, sampling(6, max_tokens=16))
    peak = 0
    while engine.scheduler.has_unfinished:
        engine.step()
        peak = max(peak, held(engine))
    assert peak == 16 + 6 * 4


@pytest.mark.parametrize("num_blocks", [11, 14, 40])
def test_preemption_changes_nothing_in_the_samples(num_blocks):
    """Catches samples renumbered, lost or merged when a group comes back."""
    engine = ToyEngine(toy_scheduler(num_blocks, 2))
    for i in range(3):
        engine.add([i] * 5, 6, sampling(2, max_tokens=6))
    assert engine.run() == engine.alone()
    assert bool(engine.scheduler.num_preemptions) == (num_blocks < 40)


@pytest.mark.parametrize(("token_id", "reason"), [(5, None), (3, "stop")])
@pytest.mark.parametrize("max_num_tokens", [3, 9])
def test_a_lone_sample_advances_as_one_of_many(token_id, reason, max_num_tokens):
    """Catches the short way for one sample if it differs from the general one, which reports logprobs."""
    request = make_request([1, 2], sampling(1, [3]), None, max_num_tokens)
    short = request.method.advance(request, [Sample([token_id], [-0.5])])
    general = request.method.advance(request, [Sample([token_id], [-0.5], [{token_id: -0.5}])])
    assert short == [replace(branch, top_logprobs=None) for branch in general]
    assert short[0].finish_reason == (reason or ("length" if max_num_tokens == 3 else None))


def test_each_sample_has_the_report_of_its_own_token():
    """Catches log-probabilities of several samples that are dropped, or are all those of the first."""
    request = make_request([1, 2], sampling(2), None)
    reports = [{5: (-0.5, 1)}, {6: (-0.9, 2)}]
    branches = request.method.advance(request, [Sample([5, 6], [-0.5, -0.9], reports)])
    assert [(branch.sample_index, branch.top_logprobs) for branch in branches] == list(enumerate(reports))
