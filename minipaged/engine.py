"""The engine: requests in, one step at a time, finished requests out.

    add_request -> scheduler.schedule() -> executor.execute(plan) -> scheduler.commit(plan, result)

It validates requests; all it knows about the model is in the `Executor`'s attributes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import proxy

from minipaged.components import Components, build_scheduler
from minipaged.config import EngineConfig
from minipaged.decoding.detokenizer import Detokenizer
from minipaged.decoding.params import DecodingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.execution.executor import Executor
from minipaged.interrupts import DeferredInterrupts
from minipaged.metrics import Metrics, StatsLogger
from minipaged.output_processor import make_output
from minipaged.outputs import RequestOutput
from minipaged.prompts import RequestError, check_params, check_token_ids
from minipaged.scheduling import FCFSScheduler, Request, StepPlan, StepResult
from minipaged.scheduling.limits import check_can_ever_run

PlannedHook = Callable[[StepPlan], None]
CommittedHook = Callable[[StepPlan, StepResult, list[Request]], None]


class Engine:
    """Continuous batching over paged KV memory.

    Args:
        executor: computes plans: a model, or a simulation of one.
        config: settings.
        tokenizer: for stop strings and texts; None if requests use only token ids.
        components: classes that replace the project's own.
        clock: seconds; read for metrics only.
        scheduler: replaces the one that config and components describe.

    Step hooks: those in `on_planned` are called with (plan) before it is executed, those in `on_committed`
    with (plan, result, touched requests) after its commit.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        tokenizer: Any = None,
        components: Components | None = None,
        clock: Callable[[], float] = time.perf_counter,
        scheduler: FCFSScheduler | None = None,
    ) -> None:
        self.executor = executor
        self.config = config
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.components = components or Components()
        self.scheduler = scheduler or build_scheduler(config, executor, self.components)
        self.clock = clock
        self.metrics = Metrics()
        self.stats_logger = None if config.disable_log_stats else StatsLogger()
        this = proxy(self)  # `self` in its own hooks would keep a dropped engine, and its pool, alive
        self.on_planned: list[PlannedHook] = [
            lambda plan: this.metrics.observe_plan(plan, this.scheduler, this._now)
        ]
        self.on_committed: list[CommittedHook] = [lambda plan, *_: this._observe(plan)]
        self._requests: dict[str, Request] = {}
        self._ended: list[Request] | None = None  # by hooks of the current step, or in a failed one
        self._now = clock()  # at the last commit or abort

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: DecodingParams, cache_salt: str = ""
    ) -> Request:
        """Validate a request completely, then queue it.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: at least one token of the model's vocabulary.
            params: the decoding method and its settings.
            cache_salt: prefixes are shared only among requests with the same salt.

        Raises:
            RequestError, ParamsError, RequestTooLongError: ValueErrors with one clear line.
        """
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use; give each request its own")
        request = self.make_request(request_id, prompt_token_ids, params, cache_salt)
        self.submit(request)
        return request

    def make_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: DecodingParams, cache_salt: str = ""
    ) -> Request:
        """Validate and build a request without queueing it; see `add_request`. Thread-safe."""
        prompt_token_ids = check_token_ids(prompt_token_ids, self.executor.vocab_size)
        check_params(params).check_vocabulary(self.executor.vocab_size)
        stop = StopChecker(params, self.executor.eos_token_ids, self.detokenizer)
        method = self.components.decoding_method(params, stop)
        if params.prompt_logprobs is not None:
            # Every prompt token must go through the model, so a unique salt prevents cache hits.
            cache_salt = secrets.token_hex()
        longest = self.executor.max_model_len
        request = Request(
            request_id,
            prompt_token_ids,
            method,
            params,
            max_num_tokens=min(longest, len(prompt_token_ids) + (params.max_tokens or longest)),
            table=self.scheduler.kv.new_table(),
            cache_salt=cache_salt,
            arrival_time=self.clock(),
        )
        check_can_ever_run(request, self.scheduler)
        return request

    def submit(self, request: Request) -> None:
        """Queue a request that is already built. Raises RequestTooLongError if it can never run."""
        with DeferredInterrupts():
            self.scheduler.add(request)
            self._requests[request.request_id] = request

    def abort(self, request_id: str, error: str | None = None) -> None:
        """End a request now, as failed if there is an `error`; unknown and finished ones are ignored."""
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            with DeferredInterrupts():
                self._now = self.clock()
                self.scheduler.abort(request, error)
                if self._ended is not None:
                    self._ended.append(request)
                self._forget(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[Request]:
        """Compute one step. Returns the requests that got tokens or ended.

        Raises:
            Exception: whatever was raised inside. The step is rolled back first: its requests are requeued
                (if a commit fails halfway, they fail). What ended is returned by the next step.
        """
        self._ended = self._ended or []
        with DeferredInterrupts() as interrupts:
            try:
                plan = self.scheduler.schedule()
                with interrupts.let_through():
                    for planned in self.on_planned:
                        planned(plan)
                    result = self.executor.execute(plan) if plan.has_work else StepResult([])
                touched = self.scheduler.commit(plan, result)
                for request_id, entries in result.prompt_logprobs.items():
                    self._requests[request_id].prompt_logprobs.update(entries)
                for committed in self.on_committed:
                    committed(plan, result, touched)
                for request in touched:
                    self._forget(request)
            except BaseException:
                if self.scheduler.in_flight is not None:
                    self.scheduler.roll_back(self.scheduler.in_flight)
                self._ended += [request for request in self._requests.values() if request.is_finished]
                for request in self._ended:
                    self._forget(request)
                raise
        ended, self._ended = self._ended, None
        return list(dict.fromkeys(touched + ended))

    def _forget(self, request: Request) -> None:
        if request.is_finished and self._requests.pop(request.request_id, None) is not None:
            self.metrics.observe_end(request, self._now)

    def _observe(self, plan: StepPlan) -> None:
        self._now = self.clock()
        self.metrics.observe(plan, self.scheduler, self._now)
        if self.stats_logger is not None:
            self.stats_logger.observe(self.metrics, self.scheduler, self._now)

    def text_rules(self, params: DecodingParams) -> StopChecker | None:
        """How the tokens of a request with these parameters become text; None without a tokenizer."""
        has_text = self.detokenizer is not None and params.detokenize
        return StopChecker(params, self.executor.eos_token_ids, self.detokenizer) if has_text else None

    def output(self, request: Request, prompt: str | None = None) -> RequestOutput:
        """What the user gets for a request, finished or not."""
        return make_output(request, prompt, self.text_rules(request.params))

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that no running request uses."""
        if self.scheduler.kv.prefix_cache is not None:
            with DeferredInterrupts():
                self.scheduler.kv.prefix_cache.clear()

    def reset_metrics(self) -> None:
        """Count from zero again; nothing else changes."""
        self.metrics = Metrics(generated_before=self.scheduler.num_generated_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is accounted for."""
        self.scheduler.check_invariants()
        if not self.has_unfinished:
            assert self.scheduler.kv.num_used == 0, "blocks are held after the last request"
