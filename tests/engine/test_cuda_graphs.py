"""Decode steps at fixed shapes: the same tokens padded, replayed and as they are.

Without a GPU the padding and the static tensors are tested as such, and replays with a capture that keeps
the computation itself: like a graph, it sees nothing of a later step but what lies in the static tensors.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from itertools import product
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.decoding.logits import edit_logits, filter_logits
from minipaged.decoding.noise import gumbel_noise
from minipaged.decoding.sampling import Sampler
from minipaged.execution import model_runner
from minipaged.execution.accel.cuda_graph import (
    CaptureError,
    CUDAGraphCapture,
    CUDAGraphRunner,
    padded_context,
    padded_rows,
)
from minipaged.execution.batch import Batch
from minipaged.execution.model_runner import ModelRunner
from minipaged.scheduling import ScheduledSequence
from minipaged.scheduling.request import Branch
from tests.engine.conftest import make_llm
from tests.machine import in_interpreter, on_gpu, skip_without_compiler
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import SUPPORTED, VOCAB_SIZE, build

CPU = torch.device("cpu")


def keep(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A capture for a CPU: the replay is the first step's computation itself, host values and all."""
    return compute


class Padding(CUDAGraphRunner):
    """Pads each step and computes it anew."""

    def __call__(self, batch: Batch) -> Tensor:
        return self._compute(self.pad(batch))[: batch.metadata.num_sequences]


class TestShapes:
    """Few shapes, none too small."""

    def test_rows_double_up_to_32_and_then_grow_by_32(self) -> None:
        """And the largest is what the settings allow, not beyond."""
        counts = (1, 2, 3, 5, 8, 9, 17, 32, 33, 64, 65, 97, 100)
        assert [padded_rows(count, 100) for count in counts] == [
            *(1, 2, 4, 8, 8, 16, 32, 32, 64, 64, 96, 100, 100)
        ]

    @pytest.mark.parametrize("limit", [1, 3, 32, 33, 256, 300])
    def test_every_count_of_rows_fits_its_shape(self, limit: int) -> None:
        """A row too few would drop a sequence."""
        shapes = [padded_rows(count, limit) for count in range(1, limit + 1)]
        assert all(count <= rows <= limit for count, rows in enumerate(shapes, start=1))
        assert shapes == sorted(shapes)
        assert len(set(shapes)) <= 6 + limit // 32

    def test_contexts_double_from_512(self) -> None:
        """1 token more than a power of two is twice the programs, not one too few."""
        tokens = (1, 512, 513, 1024, 1025, 3000)
        assert [padded_context(count, 3000) for count in tokens] == [512, 512, 1024, 1024, 2048, 3000]
        assert padded_context(100, 128) == 128


def decode_batch(driver: Driver, contexts: list[int]) -> tuple[Batch, list[ScheduledSequence]]:
    """One decode for each context length; the tokens before are not computed, only their blocks are there."""
    chunks = []
    for number, context in enumerate(contexts):
        sequence = driver.add(random_tokens(context, VOCAB_SIZE, seed=number))
        sequence.table.append(context)
        chunks.append(ScheduledSequence(sequence, context - 1, 1, 1))
    return driver.runner.builder.build(chunks), chunks


class TestStaticTensors:
    """What `fill` leaves behind."""

    @pytest.fixture
    def driver(self) -> Driver:
        return Driver(build("llama"), num_blocks=200)

    def padded(self, max_rows: int = 16) -> CUDAGraphRunner:
        return Padding(lambda batch: batch.input_ids[0], keep, max_rows, 128, 4, CPU)

    def test_real_rows_are_the_steps_and_padding_is_written_nowhere(self, driver: Driver) -> None:
        """The picture of the module's docstring."""
        batch, _ = decode_batch(driver, [9, 70, 4, 8, 1])
        filled = self.padded().pad(batch)
        given, metadata = batch.metadata, filled.metadata
        assert filled.input_ids.shape == filled.positions.shape == (1, 8)
        assert torch.equal(filled.input_ids[:, :5], batch.input_ids)
        assert torch.equal(filled.positions[:, :5], batch.positions)
        assert metadata.slot_mapping.tolist() == [*given.slot_mapping.tolist(), -1, -1, -1]
        assert metadata.context_len.tolist() == metadata.context_len_list == [9, 70, 4, 8, 1, 1, 1, 1]
        assert metadata.query_start.tolist() == metadata.query_start_list == list(range(9))
        for row, context in enumerate([9, 70, 4, 8, 1]):
            used = -(-context // 4)
            assert torch.equal(metadata.block_tables[row, :used], given.block_tables[row, :used])
        assert filled.output_indices.tolist() == list(range(8))
        assert metadata.is_decode_only
        assert metadata.max_context_len == 128

    def test_a_smaller_step_leaves_nothing_of_a_larger_one_to_be_written(self, driver: Driver) -> None:
        """Stale slots would overwrite the K/V of sequences that are not even in the step."""
        padded = self.padded()
        padded.pad(decode_batch(driver, [5] * 8)[0])
        metadata = padded.pad(decode_batch(driver, [6] * 5)[0]).metadata
        assert metadata.slot_mapping.tolist()[5:] == [-1, -1, -1]
        assert metadata.context_len.tolist() == [6, 6, 6, 6, 6, 1, 1, 1]

    def test_every_step_lies_at_the_same_addresses(self, driver: Driver) -> None:
        """A graph reads and writes where it was captured."""

        def addresses(batch: Batch) -> list[int]:
            metadata = batch.metadata
            tensors = (metadata.slot_mapping, metadata.query_start, metadata.context_len)
            tensors += (metadata.block_tables, batch.input_ids, batch.positions, batch.output_indices)
            return [tensor.data_ptr() for tensor in tensors]

        padded = self.padded()
        first = padded.pad(decode_batch(driver, [9, 70, 4])[0])
        assert addresses(padded.pad(decode_batch(driver, [3] * 11)[0])) == addresses(first)
        stride = first.metadata.block_tables.stride()
        assert padded.pad(decode_batch(driver, [2])[0]).metadata.block_tables.stride() == stride

    def test_types_are_those_of_the_steps(self, driver: Driver) -> None:
        """A copy would silently convert; the kernels read what they were compiled for."""
        batch, _ = decode_batch(driver, [9, 2, 3])
        filled = self.padded().pad(batch)
        for name in ("slot_mapping", "query_start", "context_len", "block_tables"):
            assert getattr(filled.metadata, name).dtype == getattr(batch.metadata, name).dtype, name
        for name in ("input_ids", "positions", "output_indices"):
            assert getattr(filled, name).dtype == getattr(batch, name).dtype, name

    def test_spare_blocks_beyond_the_longest_context_are_left_out(self, driver: Driver) -> None:
        """Page growth in grants gives a sequence more blocks than its longest text needs."""
        batch, chunks = decode_batch(driver, [128])
        chunks[0].sequence.table.blocks.extend([0] * 5)
        filled = self.padded().pad(driver.runner.builder.build(chunks))
        assert torch.equal(filled.metadata.block_tables, batch.metadata.block_tables)

    def test_only_decodes_that_all_have_logits_are_accepted(self, driver: Driver) -> None:
        """A prompt has other shapes; a chunk without logits would be taken for one with."""
        batch, chunks = decode_batch(driver, [9, 3, 4])
        padded, build_batch = self.padded(max_rows=4), driver.runner.builder.build
        assert padded.accepts(batch)
        prompt = ScheduledSequence(chunks[0].sequence, 0, 9, 1)
        assert not padded.accepts(build_batch([prompt, *chunks[1:]]))
        assert not padded.accepts(build_batch([*chunks[:2], chunks[2]._replace(num_candidates=0)]))
        assert not padded.accepts(decode_batch(driver, [2] * 5)[0])
        assert not Padding(padded._compute, keep, 4, 8, 4, CPU).accepts(batch)

    def test_the_results_of_padding_are_dropped(self, driver: Driver) -> None:
        """The caller sees its own rows alone."""
        batch, _ = decode_batch(driver, [9, 2, 3])
        assert torch.equal(self.padded()(batch), batch.input_ids[0])

    def test_each_shape_is_captured_once(self, driver: Driver) -> None:
        """A capture is slow, and a graph of other shapes computes something else."""
        captured: list[Callable[[], Tensor]] = []

        def capture(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
            captured.append(compute)
            return compute

        padded = CUDAGraphRunner(lambda batch: batch.input_ids[0], capture, 16, 1024, 4, CPU)
        for contexts in ([5, 6, 7], [1] * 4, [9] * 5, [3, 3, 3], [600, 1, 1], [2] * 8):
            batch, chunks = decode_batch(driver, contexts)
            assert torch.equal(padded(batch), batch.input_ids[0])
            for chunk in chunks:
                chunk.sequence.table.free()
        assert len(captured) == 3  # 4 rows, 8 rows, 4 rows with a long context


PADDED = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4", "gpt2"]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *product(("torch", "cpp"), PADDED),
        *(pytest.param("triton", name, marks=[*in_interpreter, pytest.mark.slow]) for name in PADDED),
    ],
)
def test_padding_changes_neither_logits_nor_pools(name: str, backend: str) -> None:
    """A padding row that is written, or whose NaN reaches another row; 5 decodes are padded to 8.

    Padding rows attend to block 0; that and all else that was not computed is NaN.
    """
    skip_without_compiler(backend)
    logits, pools = [], []
    for is_padded in (False, True):
        driver = Driver(build(name), attention_backend=backend)
        assert driver.pool.allocate(1) == [0]
        prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (9, 3, 17, 30, 1)]
        sequences = [driver.add(prompt) for prompt in prompts]
        driver.execute([(sequence, sequence.num_uncomputed_tokens) for sequence in sequences])
        if is_padded:
            driver.runner.decode_runner = Padding(driver.runner.compute, keep, 16, 128, 4, CPU)
        logits.append(torch.cat(driver.logits([(sequence, 1) for sequence in sequences])))
        pools.append([pool for _, *both in driver.runner.cache.pools.values() for pool in both])
    assert logits[0].shape == (5, VOCAB_SIZE)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    for pool, padded_pool in zip(*pools):
        assert padded_pool[0].isnan().all()
        torch.testing.assert_close(padded_pool, pool, atol=1e-4, rtol=0, equal_nan=True)


METHODS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(n=4, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    BeamSearchParams(beam_width=4, num_return_sequences=4, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
]
TIGHT = {"block_size": 4, "num_blocks": 56, "max_num_batched_tokens": 64, "max_num_seqs": 24}


def texts(llm: LLM, prompts: list[list[int]], methods: list) -> list:
    """Tokens and log-probabilities of every completion."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], methods)
    return [[(c.token_ids, c.cumulative_logprob) for c in output.outputs] for output in outputs]


def assert_same(actual: list, expected: list) -> None:
    """The same tokens; log-probabilities up to rounding."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-3)


def pad_decodes(llm: LLM, capture: Callable | None = None) -> list[tuple[int, int]]:
    """Pad the decode steps of an engine from now on; they are noted as (decodes, rows)."""
    runner = llm.engine.executor
    steps: list[tuple[int, int]] = []

    class Noting(Padding if capture is None else CUDAGraphRunner):
        def pad(self, batch: Batch) -> Batch:
            padded = super().pad(batch)
            steps.append((batch.metadata.num_sequences, padded.metadata.num_sequences))
            return padded

    sizes = 24, runner.max_model_len, runner.block_size
    runner.decode_runner = Noting(runner.compute, capture or keep, *sizes, CPU)
    return steps


class TestWholeRuns:
    """Greedy, samples and beams in one batch, in a pool so small that requests are preempted."""

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    @pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill_first"])
    @pytest.mark.parametrize("backend", ["torch", "cpp"])
    def test_padded_steps_give_the_same_tokens(self, model, prompts, mode, chunked, backend, caplog) -> None:
        """Stale tables after a swap, a beam that reads another's row, a sequence that lost its logits."""
        skip_without_compiler(backend)
        caplog.set_level(logging.ERROR)
        options = {**TIGHT, "preemption_mode": mode, "enable_chunked_prefill": chunked}
        options["attention_backend"] = backend
        llm = make_llm(model, **options)
        # Through the C++ kernels, which read no host values: the step of one shape stands for all later ones.
        steps = pad_decodes(llm, None if backend == "torch" else keep)
        methods = METHODS * 3
        assert_same(
            texts(llm, prompts[:12], methods), texts(make_llm(model, **options), prompts[:12], methods)
        )
        assert llm.engine.metrics.num_preemptions > 0
        assert any(decodes < rows for decodes, rows in steps)
        assert len({rows for _, rows in steps}) > 3

    def test_what_cannot_be_captured_is_computed_as_ever(self, model, prompts, caplog) -> None:
        """An experts' layer that asks the device how many tokens it has: one warning, and all tokens."""

        def refuse(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
            compute()
            raise CaptureError("it waits for the device")

        llm = make_llm(model)
        pad_decodes(llm, refuse)
        greedy = METHODS[:1] * 4
        assert_same(texts(llm, prompts[:4], greedy), texts(make_llm(model), prompts[:4], greedy))
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == [
            "enable_cuda_graphs has no effect; each step launches kernels: it waits for the device"
        ]

    def test_another_attention_is_used_at_once(self, model, prompts) -> None:
        """A captured step would go on with the attention it was captured with."""
        llm = make_llm(model, enable_prefix_caching=False)
        pad_decodes(llm, keep)
        texts(llm, prompts[:2], METHODS[:1] * 2)
        calls = []

        def noting(query, *arguments, **parameters) -> Tensor:
            calls.append(len(query))
            return zeros(query, *arguments, **parameters)

        llm.engine.executor.use_attention(noting)
        texts(llm, prompts[:2], METHODS[:1] * 2)
        assert calls[-1] == 2
        assert len(calls) == 20 * model.config.num_hidden_layers

    def test_a_runner_that_nobody_holds_frees_its_pools_at_once(self, monkeypatch) -> None:
        """A circle would keep them until a collection: the next engine finds the card full."""
        monkeypatch.setattr(ModelRunner, "_can_capture", True)
        monkeypatch.setattr(model_runner, "CUDAGraphCapture", lambda device, max_rows: keep)
        driver = Driver(build("llama"), num_blocks=200)
        sequence = driver.add([5, 6, 7])
        driver.execute([(sequence, 3)])
        driver.execute([(sequence, 1)])
        assert driver.runner.decode_runner is not None
        pool = ref(driver.runner.cache.pools[0][1])
        gc.disable()
        try:
            del driver, sequence
            assert pool() is None
        finally:
            gc.enable()

    def test_logits_of_the_driver_outlive_the_next_step(self) -> None:
        """A replay writes its logits to where it wrote those before: tests that keep views compare noise."""

        def capture(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
            result = compute()
            return lambda: result.copy_(compute())

        driver = Driver(build("llama"))
        driver.runner.decode_runner = CUDAGraphRunner(driver.runner.compute, capture, 4, 128, 4, CPU)
        sequence = driver.add([5, 6, 7])
        first = driver.logits([(sequence, 1)])[0]
        before = first.clone()
        driver.logits([(sequence, 1)])
        assert torch.equal(first, before)

    def test_on_a_cpu_nothing_is_padded(self, model) -> None:
        """A CPU computes what it is given; padding is work."""
        for switch in (True, False):
            assert make_llm(model, enable_cuda_graphs=switch).engine.executor.decode_runner is None


class ReadOnHost(TorchDispatchMode):
    """Counts operations that on a GPU would wait for a value; a capture must have none."""

    VALUES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in self.VALUES:
            self.seen.append(function._schema.name)
        return function(*args, **kwargs or {})


def replace_attention(runner: ModelRunner) -> None:
    """Attention without values of its own to ask for, so that only the model's remain."""
    runner.use_attention(zeros)
    runner.backend = runner.backend._replace(write_kv=lambda *arguments: None)


def zeros(query, key_cache, value_cache, metadata, **parameters) -> Tensor:
    """Attention that mixes nothing."""
    return query.new_zeros((*query.shape[:2], value_cache.shape[-1]))


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_padded_decode_step_asks_the_device_for_nothing(name: str) -> None:
    """One `.item()` in a model's forward pass, and none of its steps could be captured."""
    driver = Driver(build(name))
    batch, _ = decode_batch(driver, [8, 3, 4])
    padded = Padding(driver.runner.compute, keep, 4, 8, 4, CPU).pad(batch)
    replace_attention(driver.runner)
    with torch.no_grad(), ReadOnHost() as read:
        driver.runner.compute(padded)
    assert read.seen == []


def test_values_asked_for_are_noticed() -> None:
    """The test above would pass with a mode that sees nothing, as in inference mode."""
    with torch.no_grad(), ReadOnHost() as read:
        bool(torch.ones(2).all())
        torch.ones(3).nonzero()
    assert read.seen == ["aten::_local_scalar_dense", "aten::nonzero"]


def test_greedy_sampling_reads_the_device_once(monkeypatch) -> None:
    """Every further read waits for the device once more."""
    reads = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    driver = Driver(build("llama"))
    _, chunks = decode_batch(driver, [3, 4, 5])
    for chunk in chunks:
        chunk.sequence.request.params = METHODS[0]
    logits = torch.randn(3, VOCAB_SIZE)
    samples = Sampler()(logits, chunks)
    assert len(reads) == 1
    assert [sample.token_ids for sample in samples] == logits.argmax(-1, keepdim=True).tolist()
    best = torch.log_softmax(logits, dim=-1).amax(-1).tolist()
    assert [sample.logprobs[0] for sample in samples] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "waits"),
    [({"temperature": 0.7}, 1), ({"top_p": 0.9, "top_k": 40, "min_p": 0.01}, 2), ({"min_tokens": 5}, 1)],
    ids=["temperature", "filters", "edited"],
)
def test_random_sampling_reads_the_device_once_for_each_thing_it_needs(params, waits) -> None:
    """Catches a value asked for that the host knows, or a read for each row."""
    driver = Driver(build("llama"))
    _, chunks = decode_batch(driver, [3, 4, 5, 6])
    for seed, chunk in enumerate(chunks):
        chunk.sequence.request.params = SamplingParams(seed=seed, **params)
    logits = torch.randn(4, VOCAB_SIZE)
    reads = 0
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> list:
        nonlocal reads
        reads += 1
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), ReadOnHost() as read:
        patch.setattr(Tensor, "tolist", counted)
        samples = Sampler(eos_token_ids=[1])(logits, chunks)
    assert len(samples) == 4
    assert [name for name in read.seen if name != "aten::_local_scalar_dense"] == []
    assert reads + len(read.seen) == waits


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=in_interpreter)])
def test_kernels_read_no_host_value_of_a_later_step(model, backend) -> None:
    """A length or a number of splits taken from the host would stay that of the captured step."""
    prompts = [random_tokens(length, model.config.vocab_size, seed=length) for length in (5, 30, 2)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"attention_backend": backend, "block_size": 8, "num_blocks": 24}
    llm = make_llm(model, **options)
    steps = pad_decodes(llm, keep)
    assert_same(
        texts(llm, prompts, [greedy] * 3),
        texts(make_llm(model, **{**options, "attention_backend": "torch"}), prompts, [greedy] * 3),
    )
    assert steps == [(3, 4)] * 5


class TestOnAGpu:
    """Captured for real; the model's steps without graphs are the measure."""

    pytestmark = on_gpu

    @pytest.fixture(scope="class")
    def on_device(self) -> nn.Module:
        return build("llama", max_position_embeddings=2048).cuda()

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_replayed_steps_give_the_same_tokens(self, on_device, prompts, mode, caplog) -> None:
        """Greedy, samples and beams, preempted; blocks that swaps and copies move between two replays."""
        caplog.set_level(logging.ERROR)
        options = {**TIGHT, "preemption_mode": mode, "attention_backend": "triton"}
        found = []
        for switch in (True, False):
            llm = make_llm(on_device, enable_cuda_graphs=switch, **options)
            found.append(texts(llm, prompts[:12], METHODS * 3))
            assert llm.engine.metrics.num_preemptions > 0
            assert (llm.engine.executor.decode_runner is not None) == switch
        assert_same(*found)

    def test_every_size_gives_the_logits_of_the_step_as_it_is(self, on_device) -> None:
        """Up to 100 rows, captured, then replayed with other contents; contexts on both sides of 512."""
        driver = Driver(on_device, num_blocks=8000, max_num_seqs=100, attention_backend="triton")
        runner, replay = driver.runner, driver.runner.decode_runner
        assert replay is not None
        for _, keys, values in runner.cache.pools.values():
            keys.normal_()
            values.normal_()
        source = random.Random(0)
        with torch.inference_mode():
            for count in (*range(1, 18), 31, 32, 33, 64, 65, 96, 97, 100) * 2:
                longest = source.choice((40, 600))
                contexts = [longest, *(source.randint(1, 40) for _ in range(count - 1))]
                batch, chunks = decode_batch(driver, contexts)
                replayed_logits = runner.forward(batch).clone()
                torch.testing.assert_close(replayed_logits, runner.compute(batch), atol=1e-3, rtol=0)
                for chunk in chunks:
                    chunk.sequence.table.free()
        assert runner.decode_runner is replay

    def test_graphs_give_the_eager_logits_in_bf16_with_heads_of_128(self) -> None:
        """The type and head size of real models; what is not written of the pools is NaN."""
        model = build("llama", hidden_size=256, head_dim=128, max_position_embeddings=2048)
        model = model.to("cuda", torch.bfloat16)
        drivers = [
            Driver(
                model, num_blocks=600, block_size=16, enable_cuda_graphs=switch, attention_backend="triton"
            )
            for switch in (True, False)
        ]
        prompts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (3, 40, 700, 1, 16)]
        found = []
        for driver in drivers:
            sequences = [driver.add(prompt) for prompt in prompts]
            driver.execute([(sequence, len(sequence.token_ids)) for sequence in sequences])
            rows = []
            for step in range(20):
                for number, sequence in enumerate(sequences):  # the same tokens for both
                    sequence.token_ids[-1] = 2 + (7 * step + number) % (VOCAB_SIZE - 2)
                chunks = driver.scheduled([(sequence, 1) for sequence in sequences])
                with torch.inference_mode():
                    logits = driver.runner.forward(driver.runner.builder.build(chunks)).float().clone()
                rows.append(logits)
                for sequence, token in zip(sequences, logits.argmax(-1).tolist()):
                    sequence.append(Branch(sequence, token, 0.0))
            found.append(torch.stack(rows))
        assert drivers[0].runner.decode_runner is not None
        assert found[0].isfinite().all()
        torch.testing.assert_close(found[0], found[1], atol=0.05, rtol=0.02)

    def test_a_step_that_waits_for_the_device_is_computed_as_ever(self, on_device, prompts, caplog) -> None:
        """Found out before anything is captured: later steps, and other models, are not harmed."""
        llm, plain = [
            make_llm(on_device, enable_cuda_graphs=switch, attention_backend="triton")
            for switch in (True, False)
        ]

        def ask(module: nn.Module, arguments: tuple, output: Tensor) -> None:
            output.sum().item()

        asking = on_device.model.norm.register_forward_hook(ask)
        try:
            found = texts(llm, prompts[:4], METHODS)
        finally:
            asking.remove()
        assert llm.engine.executor.decode_runner is None
        assert "enable_cuda_graphs has no effect" in caplog.text
        assert_same(found, texts(plain, prompts[:4], METHODS))
        again = make_llm(on_device, attention_backend="triton")
        assert_same(texts(again, prompts[:4], METHODS), found)
        assert again.engine.executor.decode_runner is not None

    def test_what_sampling_needs_reaches_the_device_without_a_wait(self) -> None:
        """Catches small copies from pageable memory: each is a wait, several a step."""
        logits = torch.randn(4, VOCAB_SIZE, device="cuda")
        sequences = [Driver(build("llama")).add([3, 4], SamplingParams(logit_bias={5: 1.0}))] * 4
        params = [SamplingParams(temperature=0.7, min_p=0.1)] * 4
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            edited = edit_logits(logits, sequences, ())
            noise = gumbel_noise([1, 2, 3, 4], VOCAB_SIZE, logits.device)
            noise += filter_logits(edited, params)
        finally:
            torch.cuda.set_sync_debug_mode(0)
        assert noise.isfinite().any(dim=-1).all()

    def test_a_capture_leaves_torch_as_it_was(self, on_device) -> None:
        """The stream in force and the mode that refuses to wait would outlive a capture that fails."""
        device = next(on_device.parameters()).device
        stream = torch.cuda.current_stream(device)
        capture = CUDAGraphCapture(device, 4)
        replay = capture(lambda: torch.ones(2, 3, device=device))
        assert replay().tolist() == [[1.0] * 3] * 2
        with pytest.raises(CaptureError, match="synchroni"):
            capture(lambda: torch.ones(2, 3, device=device) * torch.ones(1, device=device).item())
        assert torch.cuda.current_stream(device) == stream
        assert torch.cuda.get_sync_debug_mode() == 0
        assert replay().tolist() == [[1.0] * 3] * 2
