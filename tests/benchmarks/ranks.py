"""What several ranks cost and win: `python -m tests.benchmarks.ranks --model DIR --ranks 2 [--stages 1]`.

256 requests of 16 prompt tokens, 24 new tokens each, one thread a rank; only steps of 256 decodes count.
Control is what rank 0 does for the others before it computes: `PlanEncoder.encode` and the broadcast.
"""

import argparse
import json
import random
import time
from statistics import median

import torch

NUM, PROMPT, NEW = 256, 16, 24


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--ranks", type=int, default=1, help="tensor_parallel_size")
    parser.add_argument("--stages", type=int, default=1, help="pipeline_parallel_size")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from minipaged import LLM, SamplingParams

    sizes = {"tensor_parallel_size": arguments.ranks, "pipeline_parallel_size": arguments.stages}
    llm = LLM(arguments.model, **sizes, num_blocks=NUM * 4, dtype="float32", disable_log_stats=True)
    engine, runner = llm.engine, llm.engine.executor
    parts, steps = {"encode": [], "send": [], "bytes": []}, []
    if hasattr(runner, "close"):
        watch(runner, parts)
    source, params = random.Random(0), SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for number in range(NUM):
        prompt = [source.randrange(3, runner.vocab_size) for _ in range(PROMPT)]
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished:
        before, began = engine.metrics.generation_tokens, (time.perf_counter(), time.process_time())
        engine.step()
        is_decode = engine.metrics.generation_tokens - before == NUM
        steps.append((time.perf_counter() - began[0], time.process_time() - began[1], is_decode))
    chosen = [number for number, (*_, is_decode) in enumerate(steps) if is_decode][1:]
    walls, cpus = ([steps[number][clock] for number in chosen] for clock in (0, 1))
    step = median(walls)
    result = {
        **sizes,
        "steps": len(chosen),
        "step_ms": 1e3 * step,
        "quickest_step_ms": 1e3 * min(walls),
        "cpu_ms_of_rank_0": 1e3 * median(cpus),
        "tokens_per_s": NUM / step,
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


def watch(runner, parts):
    """Time both parts of telling the other ranks."""
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
