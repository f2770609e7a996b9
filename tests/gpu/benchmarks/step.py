"""One step of a random Llama of 1.1 B parameters, its layers plain and fused: launches and time.

Of decodes, and of prompts: recomputation after a preemption, to compare with `moves`, where the K and V of a
token are as large (paper, Figure 19a).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minipaged.scheduling import ScheduledSequence
from tests.gpu.benchmarks.decode import read_ceiling
from tests.gpu.benchmarks.engine import build_model, step_bytes
from tests.gpu.benchmarks.timing import Machine
from tests.models.driver import Driver, random_tokens

RECOMPUTED = 4  # prompts of a step


def step(machine: Machine) -> None:
    """Without graphs, where the host launches kernel after kernel, and replayed as a graph."""
    model, ceiling = build_model(machine), read_ceiling(machine)
    weights, token = step_bytes(model)
    context, batches = (9, [2]) if machine.dry_run else (512, [1, 16, 64, 256])
    settings = {"attention_backend": "triton", "block_size": 16, "max_num_seqs": max(batches)}
    for layers in ("plain", "fused"):
        driver = Driver(model, num_blocks=max(batches) * -(-context // 16), **settings)
        if layers == "fused":
            driver.runner.optimize()
        for _, *pools in driver.runner.cache.pools.values():
            for pool in pools:
                pool.zero_()
        chunks = []
        for number in range(max(batches)):
            sequence = driver.add(random_tokens(context, model.config.vocab_size, seed=number))
            sequence.table.append(context)
            chunks.append(ScheduledSequence(sequence, context - 1, 1, 1))
        for count in batches:
            batch = driver.runner.builder.build(chunks[:count])
            ways = {"launched anew": driver.runner.compute, "as a graph": driver.runner.forward}
            for way, run in ways.items():
                parameters = f"{count} decodes of {context}, {layers} layers, {way}"
                with machine.attempt("step", parameters):
                    ms = machine.time_with_host_ms(lambda run=run, batch=batch: run(batch), repeat=20)
                    launches = count_launches(machine, lambda run=run, batch=batch: run(batch))
                    share = (weights + count * context * token) / ms / ceiling
                    machine.record("step", parameters, ms, "ms", launches=launches, share=share)
        prompts = [chunk._replace(start=0, num_tokens=context) for chunk in chunks[:RECOMPUTED]]
        parameters = f"{len(prompts)} prompts of {context}, {layers} layers"
        with machine.attempt("recompute", parameters):
            ms = machine.time_with_host_ms(
                partial(driver.runner.compute, driver.runner.builder.build(prompts))
            )
            filled = len(prompts) * context * token
            machine.record("recompute", parameters, filled / ms / 1e6, "GB/s", ms=ms)


def count_launches(machine: Machine, run: Callable[[], object]) -> int:
    """Kernels and copies that the device was given. (A dry run counts PyTorch's operations on the host.)"""
    activities = [ProfilerActivity.CPU] if machine.dry_run else [ProfilerActivity.CUDA]
    kind = DeviceType.CPU if machine.dry_run else DeviceType.CUDA
    with profile(activities=activities) as found:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == kind for event in found.events())
