"""vLLM on a CPU as a driver, in an environment of its own. See serve.py.

Greedy requests go through `LLMEngine.step`, called here as `minipaged bench` calls its engine, so that tokens
can be timed; samples through `LLM.generate`; beams through `LLM.beam_search`, which lives on the client's
side: every step of every beam is a new request.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from serve import Stopwatch, serve

BLOCK_SIZE = 32  # its CPU kernel takes multiples of it

# One process, no network, no statistics, threads as OMP_NUM_THREADS says.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams, RequestOutputKind

    llm = LLM(
        model=task.model,
        dtype=task.dtype,
        enforce_eager=task.engine != "vllm-compiled",
        max_model_len=2048,
        max_num_seqs=task.max_num_seqs,
        max_num_batched_tokens=task.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        # One block is its null block, which no request gets.
        num_gpu_blocks_override=None if task.num_blocks is None else task.num_blocks + 1,
        enable_prefix_caching=task.prefix_caching,
        seed=0,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler

    def params_of(request: Any, **options: Any) -> SamplingParams:
        return SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, **options)

    def greedy(requests: list[Any]) -> dict[str, Any]:
        tokens: list[list[int]] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        with Stopwatch() as watch:
            for number, one in enumerate(requests):
                params = params_of(one, temperature=0.0, output_kind=RequestOutputKind.DELTA)
                engine.add_request(str(number), {"prompt_token_ids": one.prompt_token_ids}, params)
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    number, new = int(output.request_id), output.outputs[0].token_ids
                    tokens[number] += new
                    times[number] += [now] * len(new)
        return watch.figures(tokens, times)

    def several(requests: list[Any]) -> dict[str, Any]:
        prompts: Any = [{"prompt_token_ids": one.prompt_token_ids} for one in requests]
        with Stopwatch() as watch:
            if task.method == "beam":
                (length,) = {one.max_tokens for one in requests}  # one for all
                beams = BeamSearchParams(beam_width=task.width, max_tokens=length, ignore_eos=True)
                found = [output.sequences[0].tokens for output in llm.beam_search(prompts, beams)]
                tokens = [all_of[-length:] for all_of in found]
            else:
                params = [params_of(one, n=task.width, temperature=1.0) for one in requests]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return watch.figures(tokens)

    def run(requests: list[Any] = task.requests) -> dict[str, Any]:
        llm.reset_prefix_cache()
        return greedy(requests) if task.method == "greedy" else several(requests)

    with Watch(scheduler) as seen:
        run(task.requests[: task.warm_up])
    about = {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "kv_slots": seen.peak_blocks * BLOCK_SIZE,
        "preemptions": seen.preemptions,
    }
    return run, about


class Watch:
    """Blocks that requests held at most, and preemptions; only while warming up, for it costs a little."""

    def __init__(self, scheduler: Any) -> None:
        self.peak_blocks = 0
        self.preemptions = 0
        self._scheduler = scheduler

    def __enter__(self) -> Watch:
        pool, schedule = self._scheduler.kv_cache_manager.block_pool, self._scheduler.schedule
        total = pool.num_gpu_blocks - 1  # without the null block

        def watched(*args: Any, **kwargs: Any) -> Any:
            plan = schedule(*args, **kwargs)
            self.peak_blocks = max(self.peak_blocks, total - pool.get_num_free_blocks())
            self.preemptions += len(plan.preempted_req_ids or ())
            return plan

        self._scheduler.schedule = watched
        return self

    def __exit__(self, *error: object) -> None:
        del self._scheduler.schedule  # the method shows again


if __name__ == "__main__":
    serve(start)
