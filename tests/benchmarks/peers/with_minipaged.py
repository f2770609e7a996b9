"""minipaged as a driver: what `minipaged bench` does, run after run. See serve.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from minipaged.environment import prepare_process

prepare_process()  # what the command line does, before torch is there

import torch  # noqa: E402
from serve import Stopwatch, serve  # noqa: E402

import minipaged  # noqa: E402
from minipaged import LLM, BeamSearchParams, SamplingParams  # noqa: E402
from minipaged.bench import run_workload  # noqa: E402


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call."""
    torch.set_num_threads(task.threads)
    options = {} if task.num_blocks is None else {"num_blocks": task.num_blocks}
    llm = LLM(
        task.model,
        dtype=task.dtype,
        quantization=task.quantization,
        block_size=task.block_size,
        max_num_seqs=task.max_num_seqs,
        max_num_batched_tokens=task.max_num_batched_tokens,
        enable_prefix_caching=task.prefix_caching,
        disable_log_stats=True,
        **options,
    )
    items: Any = [vars(item) for item in task.requests]

    def greedy(items: Any = items) -> dict[str, Any]:
        return run_workload(llm, items)

    def several(items: Any = items) -> dict[str, Any]:
        llm.engine.reset_prefix_cache()
        llm.engine.reset_metrics()
        prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in items]
        with Stopwatch() as watch:
            outputs = llm.generate(prompts, [params_of(item["max_tokens"]) for item in items])
        figures = watch.figures([output.outputs[0].token_ids for output in outputs])
        return {**figures, "peak_kv_blocks": llm.engine.metrics.peak_kv_blocks}

    def params_of(max_tokens: int) -> BeamSearchParams | SamplingParams:
        if task.method == "beam":
            return BeamSearchParams(
                beam_width=task.width, num_return_sequences=task.width, max_tokens=max_tokens, ignore_eos=True
            )
        return SamplingParams(n=task.width, temperature=1.0, max_tokens=max_tokens, ignore_eos=True)

    run = greedy if task.method == "greedy" else several
    warm = run(items[: task.warm_up])
    about = {
        "versions": {"minipaged": minipaged.__version__, "torch": torch.__version__},
        "kv_slots": warm["peak_kv_blocks"] * task.block_size,
        "preemptions": llm.engine.metrics.num_preemptions,
        "backend": llm.engine.executor.backend.name,
    }
    return run, about


serve(start)
