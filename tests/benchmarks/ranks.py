"""What several ranks cost and win: `python -m tests.benchmarks.ranks --model DIR --ranks 2 [--stages 1]`.

256 requests of 16 prompt tokens, 24 new tokens each, one thread a rank, three times; the first time warms up.
A step is one of 256 decodes, a run is all 256 requests, prompts included.
Control is what rank 0 does for the others before it computes: `PlanEncoder.encode` and the broadcast.
"""

import argparse
import json
import random
import time
from statistics import median

from minipaged.environment import prepare_process

NUM, PROMPT, NEW, RUNS = 256, 16, 24, 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--stages", type=int, default=1, help="pipeline_parallel_size")
    arguments = parser.parse_args()
    prepare_process()
    import torch

    torch.set_num_threads(1)
    from minipaged import LLM, SamplingParams

    sizes = {"tensor_parallel_size": arguments.ranks, "pipeline_parallel_size": arguments.stages}
    options = {"dtype": "float32", "num_blocks": NUM * 4, "enable_prefix_caching": False}
    llm = LLM(arguments.model, **sizes, **options, max_num_batched_tokens=4096, disable_log_stats=True)
    engine, runner = llm.engine, llm.engine.executor
    parts, steps = {"encode": [], "send": [], "bytes": []}, []
    if hasattr(runner, "close"):
        watch(runner, parts)
    source, params = random.Random(0), SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompts = [[source.randrange(3, runner.vocab_size) for _ in range(PROMPT)] for _ in range(NUM)]
    runs = []
    for run in range(RUNS):
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{run}-{number}", prompt, params)
        began = time.perf_counter()
        while engine.has_unfinished:
            steps.append(timed_step(engine, is_warm=run > 0))
        runs.append(time.perf_counter() - began)
    chosen = [number for number, (*_, counts) in enumerate(steps) if counts]
    walls, cpus = ([steps[number][clock] for number in chosen] for clock in (0, 1))
    step, run = median(walls), median(runs[1:])
    result = {
        **sizes,
        "steps": len(chosen),
        "step_ms": 1e3 * step,
        "quickest_step_ms": 1e3 * min(walls),
        "cpu_ms_of_rank_0": 1e3 * median(cpus),
        "run_s": run,
        "tokens_per_s_of_run": NUM * NEW / run,
    }
    if parts["send"]:
        encode, send, size = (median(parts[part][number] for number in chosen) for part in parts)
        result |= {
            "encode_ms": 1e3 * encode,
            "send_ms": 1e3 * send,
            "control_share": (encode + send) / step,
            "bytes_a_step": size,
            "bytes_a_sequence": sum(parts["bytes"][number] for number in chosen) / len(chosen) / NUM,
        }
        runner.close()
    print(json.dumps(result, indent=1))


def timed_step(engine, is_warm):
    """Seconds on the clock and of rank 0's CPU, and whether the step counts."""
    metrics = engine.metrics
    before = metrics.prompt_tokens, metrics.generation_tokens
    began = time.perf_counter(), time.process_time()
    engine.step()
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    tokens = metrics.prompt_tokens - before[0], metrics.generation_tokens - before[1]
    return *took, is_warm and tokens == (0, NUM)


def watch(runner, parts):
    """Time both parts of sending a plan to the other ranks."""
    encode, send = runner._encoder.encode, runner._group.send

    def timed_encode(plan):
        began = time.perf_counter()
        message = encode(plan)
        parts["encode"].append(time.perf_counter() - began)
        parts["bytes"].append(message.itemsize * len(message))
        return message

    def timed_send(message):
        began = time.perf_counter()
        send(message)
        parts["send"].append(time.perf_counter() - began)

    runner._encoder.encode, runner._group.send = timed_encode, timed_send


if __name__ == "__main__":
    main()
