"""transformers as a driver: padded `generate`, or its continuous batching. See serve.py.

Padded: batches of `max_num_seqs` in the order of the requests, padded on the left, each until its longest
request ends; the tokens that shorter requests did not ask for are cut off. Continuous batching: the manager
behind `generate_batch`, which other than that lets each request have a length of its own; the manager is kept
from run to run, and its start is not counted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from serve import Stopwatch, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAD = 0


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call."""
    torch.set_num_threads(task.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=task.dtype).eval()
    run = padded(model, task) if task.engine == "padded" else continuous(model, task)
    run(task.requests[: task.warm_up])
    about: dict[str, Any] = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__}
    }
    if task.engine == "padded":
        # Every row of a batch holds the longest prompt and the longest output.
        rows = min(len(task.requests), max(1, task.max_num_seqs // task.width)) * task.width
        about["kv_slots"] = rows * (
            max(len(one.prompt_token_ids) for one in task.requests)
            + max(one.max_tokens for one in task.requests)
        )
    return run, about


def padded(model: Any, task: SimpleNamespace) -> Any:
    """`model.generate` over batches padded on the left."""
    settings = {
        "greedy": {"do_sample": False},
        "beam": {"do_sample": False, "num_beams": task.width, "num_return_sequences": task.width},
        # top_k is 50 unless one says otherwise
        "sample": {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": task.width},
    }[task.method]
    model.generation_config.eos_token_id = None
    size = max(1, task.max_num_seqs // task.width)

    @torch.inference_mode()
    def run(requests: list[Any] = task.requests) -> dict[str, Any]:
        tokens: list[list[int]] = []
        with Stopwatch() as watch:
            for first in range(0, len(requests), size):
                batch = requests[first : first + size]
                longest = max(len(one.prompt_token_ids) for one in batch)
                pads = [longest - len(one.prompt_token_ids) for one in batch]
                ids = torch.tensor([[PAD] * pad + one.prompt_token_ids for pad, one in zip(pads, batch)])
                mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
                config = GenerationConfig(
                    max_new_tokens=max(one.max_tokens for one in batch), pad_token_id=PAD, **settings
                )
                output = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:]
                best = output[:: task.width if task.method != "greedy" else 1].tolist()
                tokens += [row[: one.max_tokens] for row, one in zip(best, batch)]
        return watch.figures(tokens)

    return run


def continuous(model: Any, task: SimpleNamespace) -> Any:
    """Continuous batching with a paged cache of transformers' own."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    # It sizes its pool for a GPU's memory; this one holds every request at once.
    pages = sum(-(-(len(one.prompt_token_ids) + one.max_tokens) // 32) + 1 for one in task.requests)
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=pages,
        max_batch_tokens=task.max_num_batched_tokens,
        max_requests_per_batch=task.max_num_seqs,
        allow_block_sharing=task.prefix_caching,
    )

    def run(requests: list[Any] = task.requests) -> dict[str, Any]:
        found: dict[str, list[int]] = {}
        manager = model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, warmup=False
        )
        with manager as batcher, Stopwatch() as watch:
            names = [
                batcher.add_request(one.prompt_token_ids, max_new_tokens=one.max_tokens, eos_token_id=-1)
                for one in requests
            ]
            while len(found) < len(names):
                result = batcher.get_result(timeout=1)
                if result is None and not batcher.is_running():
                    raise RuntimeError("continuous batching has stopped")
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
        return watch.figures([found[name] for name in names])

    return run


serve(start)
