"""A scheduler to be read in one go: first come, first served, one sequence per request, recompute only.

    python docs/examples/short_scheduler.py        # watch it schedule three requests, and preempt one

The engine runs on it: `--use scheduler=docs/examples/short_scheduler.py:ShortScheduler`.
"""

from __future__ import annotations

from minipaged import LLM, SamplingParams
from minipaged.scheduling import (
    FCFSScheduler,
    Request,
    RequestState,
    RequestTooLongError,
    ScheduledSequence,
    StepPlan,
    StepResult,
)


class ShortScheduler(FCFSScheduler):
    """Decides every step. The queues are inherited, and `end`, which frees the blocks of a request."""

    def add(self, request: Request) -> None:
        """Put a request at the end of `waiting`."""
        if (n := request.method.num_sequences) > 1:
            raise RequestTooLongError(f"request {request.request_id} has {n} sequences; give n=1, no beams")
        super().add(request)

    def schedule(self) -> StepPlan:
        """Running requests first, in order of arrival; then those that wait, while they fit."""
        plan = StepPlan(self.num_steps)
        self.num_steps += 1
        budget = self.max_num_batched_tokens
        for request in self.running:
            if not budget:
                break
            while not self.grow(request):
                if self.preempt_latest(plan) is request:
                    return plan  # nobody is behind it
            budget -= self.compute(plan, request, budget)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.grow(request):
                if not self.running:  # it has the whole pool to itself, and outgrew it
                    self.end(request, "length")
                    plan.finished.append(request)
                break
            self.running.append(self.waiting.popleft())
            request.state = RequestState.RUNNING
            budget -= self.compute(plan, request, budget)
        return plan

    def grow(self, request: Request) -> bool:
        """Give every token of the request a slot; False, and nothing changes, if too few blocks are free."""
        table = request.sequences[0].table
        count = request.sequences[0].num_tokens - table.num_tokens
        if table.blocks_to_append(count) > table.pool.num_free:
            return False
        table.append(count)
        return True

    def compute(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan as many uncomputed tokens as the budget allows. The last of them brings the next token."""
        sequence = request.sequences[0]
        count = min(sequence.num_uncomputed_tokens, budget)
        is_last = count == sequence.num_uncomputed_tokens
        plan.scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, count, int(is_last)))
        if is_last:
            plan.sampling.append(request)
        return count

    def preempt_latest(self, plan: StepPlan) -> Request:
        """Free all blocks of the latest arrival. It goes back to the front of the queue, to be recomputed."""
        victim = self.running.pop()
        victim.sequences[0].table.free()
        victim.sequences[0].num_computed_tokens = 0
        victim.state = RequestState.WAITING
        self.waiting.appendleft(victim)
        plan.num_preempted += 1
        return victim

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Count what was computed, and append the new tokens. Returns the requests that got one or ended."""
        # First, what may fail: if nothing has changed, the next step simply computes the same again.
        branches = [r.method.advance(r, [sample])[0] for r, sample in zip(plan.sampling, result.samples)]
        for sequence, start, num_tokens, _ in plan.scheduled:
            sequence.num_computed_tokens = start + num_tokens
        for request, branch in zip(plan.sampling, branches):
            request.sequences[0].append(branch)
            self.num_generated_tokens += 1
            if branch.finish_reason is not None:
                self.end(request, branch.finish_reason)
        return plan.sampling + plan.finished


NAMES = "ABC"


def watch() -> None:
    """Print what each step does for three requests, whose tokens need more blocks than the pool has."""
    use = {"scheduler": ShortScheduler}
    llm = LLM(block_size=4, num_blocks=7, max_num_batched_tokens=8, enable_prefix_caching=False, use=use)
    llm.engine.on_planned.append(lambda plan: show(plan, llm.engine.scheduler))
    prompts = ["The little robot found a", "Once upon a time", "The old clock"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    for name, output in zip(NAMES, outputs):
        print(f"{name}: {output.prompt}{output.outputs[0].text}")


def show(plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """One line: the positions computed of each request, its blocks, and who waits."""
    parts = []
    for sequence, start, num_tokens, _ in plan.scheduled:
        positions = f"{start}-{start + num_tokens - 1}" if num_tokens > 1 else f"{start}"
        parts.append(f"{NAMES[sequence.request.arrival]} {positions} in {sequence.table.blocks}")
    parts.append(f"{scheduler.kv.num_free} free")
    parts += [f"{NAMES[request.arrival]} waits" for request in scheduler.waiting]
    print(f"step {plan.step}:", ", ".join(parts))


if __name__ == "__main__":
    watch()
