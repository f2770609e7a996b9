"""The engine, and transformers' `generate` and continuous batching: a random Llama of 1.1 B parameters."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from minipaged import LLM, SamplingParams
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.overlap import OverlapRunner
from tests.gpu.benchmarks.decode import read_ceiling
from tests.gpu.benchmarks.timing import Machine

BATCHES = (64, 1, 16, 256)
PAGE = 256  # tokens, transformers' own default

OVERLAPPED = "engine, fused layers, async scheduling"

Run = Callable[[], list[int]]
"""Completes all prompts -> how many tokens each of them got."""


def build_model(machine: Machine) -> LlamaForCausalLM:
    """Random weights; large enough ones that greedy decoding does not repeat one token."""
    size = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if machine.dry_run:
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **size, **heads, max_position_embeddings=4096, initializer_range=0.05, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        return LlamaForCausalLM(config).to(machine.dtype).eval()


def step_bytes(model: LlamaForCausalLM) -> tuple[int, int]:
    """What a decode step reads at least: its weights but for the embeddings, and K and V of each token."""
    config = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    weights -= model.model.embed_tokens.weight.nbytes
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * model.dtype.itemsize
    return weights, token


class Workload(NamedTuple):
    """Every request at t = 0, greedy, of a fixed length."""

    model: LlamaForCausalLM
    prompts: list[list[int]]
    longest: int
    new_tokens: int
    least_ms: float  # to read the weights and the cache for each token; nothing for the prompts

    @classmethod
    def of(cls, machine: Machine, num_requests: int) -> "Workload":
        longest, new_tokens = (12, 4) if machine.dry_run else (512, 128)
        draw = random.Random(0)
        model = build_model(machine)
        prompts = [
            [draw.randrange(3, model.config.vocab_size) for _ in range(draw.randint(longest // 8, longest))]
            for _ in range(num_requests)
        ]
        weights, token = step_bytes(model)
        contexts = sum(map(len, prompts)) + num_requests * new_tokens // 2
        least_ms = new_tokens * (weights + contexts * token) / read_ceiling(machine)
        return cls(model, prompts, longest, new_tokens, least_ms)

    def measure(self, machine: Machine, name: str, prepare: Callable[[], Run]) -> None:
        """Output tokens a second of the run that `prepare` returns, and the share of what memory allows."""
        parameters = f"{len(self.prompts)} prompts of {self.longest // 8}-{self.longest}, "
        parameters += f"{self.new_tokens} new tokens: {name}"
        with machine.attempt("engine", parameters):
            run = prepare()
            seconds = min(self._timed(run) for _ in range(2))  # the first one compiles
            rate = len(self.prompts) * self.new_tokens / seconds
            machine.record("engine", parameters, rate, "tok/s", share=self.least_ms / (1e3 * seconds))

    def _timed(self, run: Run) -> float:
        """Wall-clock seconds of a run to the end of its work on the device."""
        started = time.perf_counter()
        lengths = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if lengths != [self.new_tokens] * len(self.prompts):  # (a failed request takes no time)
            raise RuntimeError(f"requests got {lengths} tokens, not {self.new_tokens} each")
        return seconds


def engine(machine: Machine) -> None:
    """The engine: one batch every way, others the fastest way."""
    first, *others = [3] if machine.dry_run else BATCHES
    work = Workload.of(machine, first)
    for fused in (False, True):  # in this order: fusing rewrites the model
        for graphs in (False, True):
            name = "engine" + ", fused layers" * fused + ", no graphs" * (not graphs)
            work.measure(machine, name, lambda f=fused, g=graphs: through_engine(work, graphs=g, fused=f))
    work.measure(machine, OVERLAPPED, lambda: through_engine(work, overlap=True))
    for num_requests in others:
        work = Workload.of(machine, num_requests)
        work.measure(machine, "engine, fused layers", lambda work=work: through_engine(work))
        work.measure(machine, OVERLAPPED, lambda work=work: through_engine(work, overlap=True))


def through_engine(work: Workload, graphs: bool = True, fused: bool = True, overlap: bool = False) -> Run:
    """All prompts through the engine, its attention in Triton."""
    options = {
        "attention_backend": "triton",
        "enable_cuda_graphs": graphs,
        "async_scheduling": overlap,
        "num_blocks": len(work.prompts) * (-(-(work.longest + work.new_tokens) // 16) + 1),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,  # the second run has the first one's prompts
    }
    runner = (OverlapRunner if overlap else ModelRunner)(work.model, config_from(options))
    if fused:
        runner.optimize()
    llm = LLM(executor=runner, **options)
    params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True)

    def run() -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


@torch.inference_mode(False)
@torch.no_grad()
def transformers(machine: Machine) -> None:
    """One batch of `generate`, and continuous batching, which refuses inference mode and may hang."""
    first, *others = [3] if machine.dry_run else BATCHES
    work = Workload.of(machine, first)
    work.measure(machine, "transformers generate", lambda: through_generate(work))
    for num_requests in (first, *others):
        work = Workload.of(machine, num_requests)
        work.measure(machine, "transformers generate_batch", lambda work=work: through_batching(work))


def greedy(work: Workload) -> GenerationConfig:
    """The same for transformers."""
    return GenerationConfig(
        max_new_tokens=work.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def through_batching(work: Workload) -> Run:
    """All prompts through transformers' continuous batching; its manager is kept for the second run."""
    pages = len(work.prompts) * (-(-(work.longest + work.new_tokens) // PAGE) + 1)  # else: all memory
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=8192, allow_block_sharing=False
    )

    def run() -> list[int]:
        outputs = work.model.generate_batch(
            inputs=work.prompts,
            generation_config=greedy(work),
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        return [len(output.generated_tokens) for output in outputs.values()]

    return run


def through_generate(work: Workload) -> Run:
    """All prompts as one batch, padded on the left."""
    device = work.model.device

    def run() -> list[int]:
        width = max(map(len, work.prompts))
        padding = [width - len(prompt) for prompt in work.prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, work.prompts)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        tensors = [torch.tensor(rows, device=device) for rows in (ids, mask)]
        output = work.model.generate(tensors[0], attention_mask=tensors[1], generation_config=greedy(work))
        return [output.shape[1] - width] * len(output)

    return run
