"""The engine against transformers' `generate` and continuous batching: a random Llama of 1.1 B parameters."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from minipaged import LLM, SamplingParams
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from tests.gpu.benchmarks.decode import read_ceiling
from tests.gpu.benchmarks.timing import Machine

BATCHES = (64, 1, 16, 256)


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
    least_ms: float  # to read the weights and the cache of every decode step; nothing for the prompts

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

    @property
    def greedy(self) -> GenerationConfig:
        """The same for transformers."""
        return GenerationConfig(
            max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def measure(self, machine: Machine, name: str, prepare: Callable[[], Callable[[], None]]) -> None:
        """Output tokens a second of the run that `prepare` returns."""
        parameters = f"{len(self.prompts)} prompts of {self.longest // 8}-{self.longest}, "
        parameters += f"{self.new_tokens} new tokens: {name}"
        with machine.attempt("engine", parameters):
            run = prepare()
            seconds = min(timed(machine, run) for _ in range(2))  # the first one compiles
            share = self.least_ms / (1e3 * seconds)
            machine.record(
                "engine", parameters, len(self.prompts) * self.new_tokens / seconds, "tok/s", share=share
            )


def batching(machine: Machine) -> None:
    """Transformers' continuous batching, which may hang: in a process of its own, like every benchmark."""
    for num_requests in BATCHES:
        work = Workload.of(machine, num_requests)

        def prepare(work: Workload = work) -> Callable[[], None]:
            if machine.dry_run:
                raise NotImplementedError("generate_batch needs a GPU")
            return partial(work.model.generate_batch, inputs=work.prompts, generation_config=work.greedy)

        work.measure(machine, "transformers generate_batch", prepare)


def engine(machine: Machine) -> None:
    """The engine: of one batch every way and beside transformers' `generate`, of others the fastest way."""
    first, *others = [3] if machine.dry_run else BATCHES
    compare(machine, Workload.of(machine, first), ())
    for num_requests in others:
        compare(machine, Workload.of(machine, num_requests), ("engine, fused layers",))


def compare(machine: Machine, work: Workload, names: tuple[str, ...]) -> None:
    """Measure the contenders of these names, or all."""
    model, prompts, longest, new_tokens, _ = work

    def generate() -> None:
        """One batch, padded on the left."""
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, prompts)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        tensors = [torch.tensor(rows, device=machine.device) for rows in (ids, mask)]
        model.generate(tensors[0], attention_mask=tensors[1], generation_config=work.greedy)

    def through(graphs: bool = True, fused: bool = False) -> Callable[[], None]:
        blocks = len(prompts) * (-(-(longest + new_tokens) // 16) + 1)
        options = {
            "attention_backend": "triton",
            "enable_cuda_graphs": graphs,
            "num_blocks": blocks,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,  # the second run has the first one's prompts
        }
        runner = ModelRunner(model, config_from(options))
        if fused:
            runner.optimize()
        llm = LLM(executor=runner, **options)
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

        def run() -> None:
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)

        return run

    # In this order: the engine switches the model's attention to its own, and at last fuses its layers.
    contenders: dict[str, Callable[[], Callable[[], None]]] = {
        "transformers generate": lambda: generate,
        "engine, no graphs": lambda: through(graphs=False),
        "engine": lambda: through(),
        "engine, fused layers, no graphs": lambda: through(graphs=False, fused=True),
        "engine, fused layers": lambda: through(fused=True),
    }
    for name in names or contenders:
        work.measure(machine, name, contenders[name])


def timed(machine: Machine, run: Callable[[], None]) -> float:
    """Wall-clock seconds of a run to the end of its work on the device."""
    started = time.perf_counter()
    run()
    if not machine.dry_run:
        torch.cuda.synchronize()
    return time.perf_counter() - started
