"""Overlap scheduling: steps that begin before they are planned give the tokens of those that do not.

On a CPU, "captured" decodes are computed as they are, into one buffer for all of them, as on a GPU: whoever
reads logits too late reads those of the next step. What is not written of the pool is NaN.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.components import Components
from minipaged.config import ConfigError, config_from
from minipaged.decoding import sampling
from minipaged.decoding.methods import SamplingMethod
from minipaged.execution import model_runner
from minipaged.execution.accel.cuda_graph import CaptureError
from minipaged.execution.batch import BatchBuilder
from minipaged.execution.overlap import BegunStep, OverlapRunner
from minipaged.kernels.dispatch import why_not_cpp
from minipaged.scheduling import ScheduledSequence
from tests.engine.conftest import make_llm
from tests.models.zoo import build
from tests.slow import slow_but

if (missing := why_not_cpp(torch.device("cpu"))) is not None:
    pytest.skip(missing, allow_module_level=True)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Overlapping(OverlapRunner):
    """Notes what happens, in order.

    Attributes:
        notes: ("begun", rows, of which borrow a block), ("taken", rows) or ("dropped",), and ("read",).
    """

    _can_capture = True

    def __init__(self, *args: object) -> None:
        self.notes: list[tuple] = []
        super().__init__(*args)
        for _, keys, values in self.cache.pools.values():
            keys.fill_(float("nan"))
            values.fill_(float("nan"))

    def _begin(self, *args: object) -> None:
        super()._begin(*args)
        if (begun := self._begun) is not None:
            self.notes.append(
                ("begun", len(begun.rows), sum(row.block >= self.num_blocks for row in begun.rows.values()))
            )

    def _take(self, begun: BegunStep, scheduled: list[ScheduledSequence]) -> Tensor | None:
        logits = super()._take(begun, scheduled)
        self.notes.append(("dropped",) if logits is None else ("taken", len(logits)))
        return logits

    def count(self, kind: str) -> int:
        """Notes of a kind."""
        return sum(note[0] == kind for note in self.notes)


class IntoOneBuffer:
    """A capture whose replays leave their logits where all others do."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self.results: Tensor | None = None
        self.max_rows = max_rows

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            logits = compute()
            if self.results is None:
                self.results = logits.new_empty((self.max_rows, logits.shape[1]))
            return self.results[: len(logits)].copy_(logits)

        return replay


@pytest.fixture(autouse=True)
def one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """See the module."""
    monkeypatch.setattr(model_runner, "CUDAGraphCapture", IntoOneBuffer)


def overlapping(model: nn.Module, components: Components | None = None, **options) -> LLM:
    """With overlap."""
    return make_llm(model, components, Overlapping, attention_backend="cpp", **options)


def plain(model: nn.Module, components: Components | None = None, **options) -> LLM:
    """Without overlap."""
    return make_llm(model, components, attention_backend="cpp", **options)


def texts(llm: LLM, prompts: list[list[int]], params: object) -> list:
    """Tokens and log-probabilities of every completion."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [
        [(done.token_ids, pytest.approx(done.cumulative_logprob, abs=1e-3)) for done in output.outputs]
        for output in outputs
    ]


METHODS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, max_tokens=31, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=25),
    SamplingParams(temperature=1.0, seed=1, no_repeat_ngram_size=2, logit_bias={5: 2.0}, max_tokens=30),
    SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
]
TIGHT = {"block_size": 4, "num_blocks": 56, "max_num_batched_tokens": 64, "max_num_seqs": 24}


class TestTokens:
    """They are the same, whatever happens between two steps."""

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill_first"])
    @pytest.mark.parametrize("growth", ["on_demand", "chunked"])
    def test_of_all_methods_in_a_small_pool(self, model, prompts, mode, chunked, growth, caplog) -> None:
        """Requests are preempted, end, fork and start while steps are under way."""
        caplog.set_level(logging.ERROR)
        options = {**TIGHT, "preemption_mode": mode, "enable_chunked_prefill": chunked, "page_growth": growth}
        llm = overlapping(model, **options)
        params = (METHODS * 4)[:20]
        assert texts(llm, prompts[:20], params) == texts(plain(model, **options), prompts[:20], params)
        runner = llm.engine.executor
        assert llm.engine.metrics.num_preemptions > 0
        assert runner.count("taken") > 20
        assert runner.count("dropped") > 5
        assert any(note[0] == "begun" and note[2] > 0 for note in runner.notes), "no block was borrowed"

    @pytest.mark.parametrize("block_size", [1, 2, 16])
    def test_with_blocks_of_any_size(self, model, prompts, block_size) -> None:
        """With blocks of one token, every row borrows one."""
        llm = overlapping(model, block_size=block_size, num_blocks=1000)
        options = {"block_size": block_size, "num_blocks": 1000}
        assert texts(llm, prompts[:9], GREEDY) == texts(plain(model, **options), prompts[:9], GREEDY)
        begun = [note for note in llm.engine.executor.notes if note[0] == "begun"]
        rows, borrowed = (sum(column) for column in list(zip(*begun))[1:])
        assert borrowed == rows if block_size == 1 else 0 < borrowed < rows

    def test_up_to_the_last_position(self, model, prompts) -> None:
        """Of a sequence that is begun, only the length is known, of all its tokens."""
        options = {"max_model_len": len(prompts[0]) + 19}
        llm = overlapping(model, **options)
        assert texts(llm, prompts[:1], GREEDY) == texts(plain(model, **options), prompts[:1], GREEDY)
        assert llm.engine.executor.count("taken") == 17

    def test_of_beams_and_drafts_beside_them(self, model, prompts) -> None:
        """Steps with either are not continued before the host knows their tokens."""
        params = [GREEDY, BeamSearchParams(beam_width=3, max_tokens=8)]
        llm = overlapping(model)
        assert texts(llm, prompts[:2], params) == texts(plain(model), prompts[:2], params)
        assert 0 < llm.engine.executor.count("begun") < 19
        llm = overlapping(model, num_speculative_tokens=3)
        assert texts(llm, prompts[:3], GREEDY) == texts(plain(model), prompts[:3], GREEDY)
        assert not llm.engine.executor.notes

    def test_prefixes_are_found_as_ever(self, model, prompts) -> None:
        """A block that was borrowed and copied is cached with the content of its sequence."""
        turns = []
        for llm in (overlapping(model, block_size=4), plain(model, block_size=4)):
            (first,) = llm.generate([{"prompt_token_ids": prompts[0]}], GREEDY)
            longer = prompts[0] + first.outputs[0].token_ids + [7, 8, 9]
            (second,) = llm.generate([{"prompt_token_ids": longer}], GREEDY)
            turns.append((second.num_cached_tokens, second.outputs[0].token_ids))
        assert turns[0] == turns[1]
        assert turns[0][0] >= len(prompts[0])

    def test_a_method_that_takes_another_token_than_the_sample(self, model, prompts) -> None:
        """The step began with the sample."""

        class Other(SamplingMethod):
            def advance(self, request, samples):
                branches = super().advance(request, samples)
                return [replace(branch, token_id=(branch.token_id + 1) % 50) for branch in branches]

        components = Components(parallel_sampling=Other)
        llm = overlapping(model, components)
        assert texts(llm, prompts[:3], GREEDY) == texts(plain(model, components), prompts[:3], GREEDY)
        assert llm.engine.executor.count("taken") == 0
        assert llm.engine.executor.count("dropped") > 15


@pytest.mark.parametrize("seed", slow_but(range(4), range(12)))
def test_random_requests_get_their_own_tokens(model, prompts, seed, caplog) -> None:
    """Any settings, arrivals and aborts; each request's tokens are those it gets alone."""
    caplog.set_level(logging.ERROR)
    draw = random.Random(seed)
    options = {
        "block_size": draw.choice([1, 2, 3, 4, 8]),
        "max_num_seqs": draw.randint(3, 12),
        "max_num_batched_tokens": draw.choice([draw.randint(3, 12), 64]),
        "enable_chunked_prefill": draw.random() < 0.5,
        "enable_prefix_caching": draw.random() < 0.5,
        "preemption_mode": draw.choice(["recompute", "swap"]),
        "page_growth": draw.choice(["on_demand", "chunked"]),
    }
    options["num_blocks"] = draw.randint(100, 160) // options["block_size"]
    llm = overlapping(model, **options)
    engine, wanted = llm.engine, {}
    while len(wanted) < 30 or engine.has_unfinished:
        if len(wanted) < 30 and draw.random() < 0.3:
            name = str(len(wanted))
            params = draw.choice(METHODS[:5]).clone(seed=len(wanted), max_tokens=draw.randint(1, 30))
            wanted[name] = engine.add_request(name, draw.choice(prompts)[:40], params)
        if draw.random() < 0.03:
            engine.abort(str(draw.randrange(30)))
        engine.step()
    alone = plain(model, enable_prefix_caching=False)
    for request in wanted.values():
        done = request.completions[0]
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        (expected,) = alone.generate([prompt], request.params)
        count = len(done.output_token_ids)
        assert done.output_token_ids == expected.outputs[0].token_ids[:count]
        assert done.finish_reason == "abort" or count == len(expected.outputs[0].token_ids)
    assert engine.executor.count("taken") > 10


class TestSteps:
    """What is begun, and what becomes of it."""

    def test_each_decode_but_the_first_was_begun_before_its_plan(self, model, prompts) -> None:
        """Three requests of the same length; the step after their last tokens is not begun."""
        llm = overlapping(model, enable_prefix_caching=False)
        texts(llm, prompts[:3], GREEDY)
        notes = llm.engine.executor.notes
        assert [note[:2] for note in notes] == [("begun", 3), ("taken", 3)] * 18

    def test_its_tensors_are_those_of_the_plan(self, model, prompts, monkeypatch) -> None:
        """Catches a longest context that is another row's: the attention would skip the last splits."""
        take, compared = OverlapRunner._take, []

        def comparing(runner: OverlapRunner, begun: BegunStep, scheduled: list) -> Tensor | None:
            logits = take(runner, begun, scheduled)
            if logits is begun.logits and all(row.block < runner.num_blocks for row in begun.rows.values()):
                expected, found = BatchBuilder("cpu").build(scheduled), begun.batch
                compared.append(len(scheduled))
                for name in ("input_ids", "positions", "output_indices", "output_rows"):
                    assert str(getattr(found, name)) == str(getattr(expected, name)), name
                for name in (field.name for field in fields(expected.metadata)):
                    value = getattr(expected.metadata, name)
                    if name == "block_tables":  # (one may be wider; what is past a table's end means nothing)
                        for row, item in enumerate(scheduled):
                            count = len(item.sequence.table.blocks)
                            assert found.metadata.block_tables[row, :count].equal(value[row, :count])
                    else:
                        assert str(getattr(found.metadata, name)) == str(value), name
            return logits

        monkeypatch.setattr(OverlapRunner, "_take", comparing)
        texts(overlapping(model, enable_prefix_caching=False), prompts[:4], GREEDY)
        assert len(compared) > 10
        assert set(compared) == {4}

    def test_logits_are_in_the_order_of_the_plan(self, model, prompts, monkeypatch) -> None:
        """Catches those of a step begun in another order."""
        take, compared = OverlapRunner._take, []

        def reversing(runner: OverlapRunner, begun: BegunStep, scheduled: list) -> Tensor | None:
            logits = take(runner, begun, scheduled)
            if logits is not None:
                compared.append(take(runner, begun, scheduled[::-1]).equal(logits.flip(0)))
            return logits

        monkeypatch.setattr(OverlapRunner, "_take", reversing)
        texts(overlapping(model, enable_prefix_caching=False), prompts[:3], GREEDY)
        assert len(compared) > 10
        assert all(compared)

    def test_others_go_on_where_a_request_gets_its_last_token(self, model, prompts) -> None:
        """Catches a step that is not begun for those behind it."""
        llm = overlapping(model, enable_prefix_caching=False)
        texts(llm, prompts[:2], [GREEDY.clone(max_tokens=5), GREEDY])
        assert llm.engine.executor.count("taken") == 18

    def test_no_step_is_computed_twice(self, model, prompts, monkeypatch) -> None:
        """Catches logits that are computed anew though they are finite."""
        runner = (llm := overlapping(model)).engine.executor
        batches, compute = [], runner.compute
        monkeypatch.setattr(runner, "compute", lambda batch: batches.append(batch) or compute(batch))
        texts(llm, prompts[:1], GREEDY)
        assert len(batches) == 20

    def test_the_next_step_begins_before_the_host_reads(self, model, prompts, monkeypatch) -> None:
        """But the copy to the host comes first: behind the next step, it would be waited for as long."""
        llm = overlapping(model, enable_prefix_caching=False)
        notes = llm.engine.executor.notes

        def start_reading(tensor: Tensor) -> Callable[[], list]:
            notes.append(("copy",))
            values = tensor.tolist()
            tensor.fill_(-1)

            def read() -> list:
                notes.append(("read",))
                return values

            return read

        monkeypatch.setattr(sampling, "start_reading", start_reading)
        for params in (GREEDY, SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True)):
            notes.clear()
            texts(llm, prompts[:1], params)
            order = [note[0] for note in notes]
            assert order == ["copy", "begun", "read", "taken"] * 18 + ["copy", "read"]

    def test_rows_of_sequences_that_ended_are_left_out(self, model, prompts) -> None:
        """A sequence that stops by a token, which no one knew, takes its row with it."""
        ((tokens, _),) = texts(plain(model), prompts[:1], GREEDY)[0]
        stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
        stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
        llm = overlapping(model)
        params = [stopping, GREEDY, GREEDY]
        assert texts(llm, prompts[:3], params) == texts(plain(model), prompts[:3], params)
        notes = llm.engine.executor.notes
        assert ("taken", 2) in notes
        assert notes[notes.index(("taken", 2)) - 1][1] == 3

    def test_a_request_that_arrives_makes_the_step_a_new_one(self, model, prompts) -> None:
        """Its prompt is computed beside the decodes."""
        found = []
        for llm in (overlapping(model), plain(model)):
            engine = llm.engine
            first = engine.add_request("a", prompts[0], GREEDY)
            for _ in range(5):
                engine.step()
            second = engine.add_request("b", prompts[1], GREEDY)
            while engine.has_unfinished:
                engine.step()
            found.append([list(request.completions[0].token_ids) for request in (first, second)])
            if llm.engine.executor.decode_runner is not None and hasattr(engine.executor, "notes"):
                assert engine.executor.count("dropped") == 1
        assert found[0] == found[1]

    def test_an_aborted_request_and_a_failed_step(self, model, prompts) -> None:
        """What was begun for them is not used for others, nor twice."""
        llm = overlapping(model)
        engine, runner = llm.engine, llm.engine.executor
        for name, prompt in zip("abc", prompts):
            engine.add_request(name, prompt, GREEDY)
        requests = [engine._requests[name] for name in "ac"]
        for _ in range(4):
            engine.step()
        engine.abort("b")
        engine.step()
        assert runner.notes[-2] == ("taken", 2)
        sampler = runner.sampler

        def fail(logits: Tensor, scheduled: list, follow: Callable) -> None:
            follow([0, 1], logits.argmax(-1))
            raise RuntimeError("injected")

        runner._can_go_on = lambda batch: True
        runner.sampler = fail
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
        del runner._can_go_on
        runner.sampler = sampler
        while engine.has_unfinished:
            engine.step()
        expected = texts(plain(model), [prompts[0], prompts[2]], GREEDY)
        assert [list(r.completions[0].output_token_ids) for r in requests] == [
            tokens for ((tokens, _),) in expected
        ]

    def test_a_plan_that_fails_before_it_is_computed(self, model, prompts) -> None:
        """Its request starts again at the same token, its prefix cached, but not in the block where the token
        was computed."""
        llm = overlapping(model, block_size=4, page_growth="chunked")
        engine, prompt = llm.engine, prompts[0][:7]
        request = engine.add_request("a", prompt, GREEDY)
        (sequence,) = request.sequences
        for _ in range(2):
            engine.step()
        assert len(sequence.token_ids) == 9
        begun, before = engine.executor._begun.rows[sequence], sequence.table.blocks[:]
        engine.on_planned.append(lambda plan: plan.nothing_of_this_kind)
        with pytest.raises(AttributeError):
            engine.step()
        engine.on_planned.pop()
        held = engine.scheduler.kv.pool.allocate(20)  # those that were freed, for something else
        check = engine.on_committed.pop()
        engine.step()
        engine.on_committed.append(check)
        for block in held:
            engine.scheduler.kv.pool.free(block)
        assert sequence.table.blocks[:2] == before[:2] != sequence.table.blocks[2] != begun.block == before[2]
        while engine.has_unfinished:
            engine.step()
        ((expected, _),) = texts(plain(model), [prompt], GREEDY)[0]
        assert request.completions[0].output_token_ids == expected

    def test_a_plan_that_begins_at_another_token_of_the_same_kind(self, model) -> None:
        """A request of equal tokens that starts again: its first token is not the one that was begun."""
        llm = overlapping(model, block_size=4, enable_prefix_caching=False)
        engine = llm.engine
        request = engine.add_request("a", [7] * 7, GREEDY.clone(allowed_token_ids=[7]))
        for _ in range(2):
            engine.step()
        engine.on_planned.append(lambda plan: plan.nothing_of_this_kind)
        with pytest.raises(AttributeError):
            engine.step()
        engine.on_planned.pop()
        while engine.has_unfinished:
            engine.step()
        assert (request.completions[0].finish_reason, request.error) == ("length", None)

    def test_who_wants_log_probabilities_is_not_overtaken(self, model, prompts) -> None:
        """They are read after the tokens, from logits that the next step overwrites."""
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
        llm = overlapping(model)
        (output,) = llm.generate([{"prompt_token_ids": prompts[0]}], params)
        (expected,) = plain(model).generate([{"prompt_token_ids": prompts[0]}], params)
        assert not llm.engine.executor.notes
        for ours, theirs in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            assert {token: entry.rank for token, entry in ours.items()} == {
                token: entry.rank for token, entry in theirs.items()
            }

    def test_a_sampler_of_ones_own_is_not_asked_to_go_on(self, model, prompts) -> None:
        """It has two arguments (`TokenSampler`), though it may be a `Sampler`."""

        class Second(sampling.Sampler):
            def __call__(self, logits, scheduled):
                best = logits.argmax(-1, keepdim=True)
                return super().__call__(logits.scatter(1, best, -torch.inf), scheduled)

        found = []
        for kind in (Overlapping, model_runner.ModelRunner):
            options = {"num_blocks": 64, "attention_backend": "cpp", "disable_log_stats": True}
            runner = kind(model, config_from(options), Second())
            found.append(texts(LLM(executor=runner, **options), prompts[:2], GREEDY))
            assert not getattr(runner, "notes", None)
        assert found[0] == found[1]

    def test_where_decodes_cannot_be_captured_nothing_is_begun(self, model, prompts, monkeypatch) -> None:
        """Catches a step that fails, and all after it, though it can be computed as always."""

        def fail(self: IntoOneBuffer, compute: Callable[[], Tensor]) -> None:
            raise CaptureError("it waits for the device")

        monkeypatch.setattr(IntoOneBuffer, "__call__", fail)
        llm = overlapping(model)
        assert texts(llm, prompts[:3], GREEDY) == texts(plain(model), prompts[:3], GREEDY)
        assert llm.engine.executor.notes == []

    def test_with_more_new_blocks_than_spare_ones_nothing_is_begun(self, model, prompts, monkeypatch) -> None:
        """All of them at once, as with prompts of the same length."""
        monkeypatch.setattr("minipaged.execution.overlap.SPARE_TOKENS", 8)
        same = [prompt[:1] * 5 for prompt in prompts[:3]]
        llm = overlapping(model, block_size=4, enable_prefix_caching=False)
        options = {"block_size": 4, "enable_prefix_caching": False}
        assert texts(llm, same, GREEDY) == texts(plain(model, **options), same, GREEDY)
        assert llm.engine.executor.num_spare_blocks == 2
        assert llm.engine.executor.count("taken") == 14  # of 18; 4 times they need 3 blocks
        assert llm.engine.executor.count("dropped") == 0

    def test_a_row_that_is_not_finite_says_so(self, prompts) -> None:
        """The logits that show why are computed again: in its last step, others have taken their place."""
        model = build("llama")
        llm = overlapping(model, enable_prefix_caching=False)
        engine, runner = llm.engine, llm.engine.executor
        wanted = [GREEDY.clone(max_tokens=5), GREEDY]
        requests = [engine.add_request(*each) for each in zip("ab", prompts, wanted)]
        for _ in range(3):
            engine.step()
        table = requests[0].sequences[0].table
        for _, keys, _ in runner.cache.pools.values():
            keys[table.blocks[0]] = float("nan")
        for _ in range(2):
            engine.step()
        assert requests[0].error == (
            "the model's logits are not finite: its weights may have NaN, or its dtype overflows"
        )
        while engine.has_unfinished:
            engine.step()
        assert requests[1].completions[0].finish_reason == "length"

    def test_what_is_computed_again_leaves_the_next_step_as_it_is(self, prompts) -> None:
        """That step has the spare blocks by then."""
        model, longer = build("llama"), GREEDY.clone(max_tokens=30)
        llm = overlapping(model, block_size=1, enable_prefix_caching=False)
        engine, runner = llm.engine, llm.engine.executor
        short = [prompt[:4] for prompt in prompts]  # so that each token counts
        requests = [engine.add_request(*each) for each in zip("ab", short, [GREEDY, longer])]
        for _ in range(3):
            engine.step()
        for _, keys, _ in runner.cache.pools.values():
            keys[requests[0].sequences[0].table.blocks[0]] = float("nan")
        while engine.has_unfinished:
            engine.step()
        assert "not finite" in requests[0].error
        ((expected, _),) = texts(plain(model, block_size=1), [short[1]], longer)[0]
        assert requests[1].completions[0].output_token_ids == expected

    def test_a_step_that_was_begun_is_built_once(self, model, prompts, monkeypatch) -> None:
        """Its tensors are on the device already."""
        llm = overlapping(model, enable_prefix_caching=False)
        builder = llm.engine.executor.builder
        built, assemble = [], builder.assemble
        monkeypatch.setattr(builder, "assemble", lambda *rows: built.append(rows) or assemble(*rows))
        texts(llm, prompts[:3], GREEDY)
        assert len(built) == 20


class TestSpareBlocks:
    """They come with the pool, and no plan names them."""

    def test_the_engine_does_not_see_them(self, model) -> None:
        """`num_blocks` is used as given."""
        runner = overlapping(model, num_blocks=50, max_num_seqs=8).engine.executor
        assert (runner.num_blocks, runner.num_spare_blocks) == (50, 8)
        assert {len(keys) for _, keys, _ in runner.cache.pools.values()} == {58}

    @pytest.mark.parametrize(("block_size", "count"), [(1, 300), (4, 256), (16, 64), (256, 4)], ids=str)
    def test_they_hold_as_many_tokens_in_blocks_of_any_size(self, model, block_size, count) -> None:
        """Rows fill a small block more often; a few large ones would take gigabytes of a large model."""
        options = {"block_size": block_size, "num_blocks": 8, "max_num_seqs": 300}
        assert overlapping(model, **options).engine.executor.num_spare_blocks == count

    def test_a_pool_sized_by_memory_holds_them_too(self, model) -> None:
        """Its bytes are what the settings say."""
        block_bytes = plain(model).engine.executor.block_bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runner, "available_bytes", lambda *args: 100 * block_bytes)
            options = {"num_blocks": None, "max_num_seqs": 16}
            runner = Overlapping(model, config_from({"attention_backend": "cpp", **options}))
        assert (runner.num_blocks, len(runner.cache.pools[0][1])) == (84, 100)

    def test_so_does_a_pool_of_a_given_size(self, model) -> None:
        """`kv_cache_memory` is what the pool takes, all in all."""
        block_bytes = plain(model).engine.executor.block_bytes
        options = {"attention_backend": "cpp", "max_num_seqs": 16, "kv_cache_memory": 100 * block_bytes}
        runner = Overlapping(model, config_from(options))
        assert (runner.num_blocks, len(runner.cache.pools[0][1])) == (84, 100)
        given = 16 * block_bytes
        message = f"{given} bytes .*; raise kv_cache_memory, or turn async_scheduling off .*16 spare blocks"
        with pytest.raises(ConfigError, match=message):
            Overlapping(model, config_from({**options, "kv_cache_memory": given}))

    def test_where_nothing_is_captured_there_are_none(self, model) -> None:
        """On a CPU it is a `ModelRunner`."""
        runner = OverlapRunner(model, config_from({"num_blocks": 50}))
        assert runner.num_spare_blocks == 0
        assert len(runner.cache.pools[0][1]) == 50
