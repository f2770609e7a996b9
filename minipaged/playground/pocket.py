"""The pocket model in a page: this engine schedules, JavaScript computes (docs/play/model.js).

The two exchange JSON, because a step is small:

    {"copies": [[2, 5]], "swap_out": [], "swap_in": [],
     "rows": [{"tokens": [0, 311], "start": 0, "table": [4], "candidates": 1, "temperature": 0}]}
    [[[582], [-0.4]]]                          for each row with candidates, its tokens and log-probabilities
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from typing import Any

from minipaged.config import EngineConfig
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.engine import Engine
from minipaged.scheduling import (
    PreemptionCosts,
    Request,
    RequestTooLongError,
    Sample,
    Sequence,
    StepPlan,
    StepResult,
)
from minipaged.viewer.trace import TraceLines

Compute = Callable[[str], str]
"""A step in JSON -> its samples in JSON."""


class PocketExecutor:
    """An `Executor` whose model is a function that takes and returns JSON.

    `model`: max_model_len, vocab_size, eos_token_ids and block_bytes, as the page knows them.
    """

    kept_states: Container[int] | None = None

    def __init__(self, compute: Compute, model: Mapping[str, Any], config: EngineConfig) -> None:
        assert config.num_blocks is not None
        self._compute = compute
        self.block_size = config.block_size
        self.num_blocks = self.num_host_blocks = config.num_blocks
        self.block_bytes: int = model["block_bytes"]
        self.max_model_len: int = model["max_model_len"]
        self.vocab_size: int = model["vocab_size"]
        self.eos_token_ids: tuple[int, ...] = tuple(model["eos_token_ids"])
        self.preemption_costs = PreemptionCosts(0.0, 0.0, 0.0)

    def execute(self, plan: StepPlan) -> StepResult:
        """Make the moves and compute the rows."""
        rows = [
            {
                "tokens": list(sequence.token_ids[start : start + num_tokens]),
                "start": start,
                "table": list(sequence.table.blocks),
                "candidates": num_candidates,
                "temperature": _temperature(sequence.request.params),
            }
            for sequence, start, num_tokens, num_candidates in plan.scheduled
        ]
        step = {name: getattr(plan, name) for name in ("swap_out", "swap_in", "copies")}
        answers = json.loads(self._compute(json.dumps({**step, "rows": rows})))
        return StepResult([Sample(tokens, logprobs) for tokens, logprobs in answers])


def _temperature(params: DecodingParams) -> float:
    """The temperature of the draw; 0: nothing is drawn, the likeliest tokens are the candidates."""
    return params.temperature if isinstance(params, SamplingParams) else 0.0


def _answers(request: Request) -> list[Sequence]:
    """The sequences to show: live beams, or samples by number; at the end what is returned, in that order."""
    if request.is_finished:
        return request.method.rank(request)
    if isinstance(request.params, BeamSearchParams):
        return request.sequences
    return sorted((*request.completions, *request.sequences), key=attrgetter("index"))


class PocketRun:
    """An engine over the page's model: it accepts prompts at any time, runs one step at a time and returns
    token ids.

    Args:
        compute: the model.
        model: see `PocketExecutor`.
        texts: of each token, for the viewer.
        settings: fields of `EngineConfig`.
    """

    def __init__(
        self, compute: Compute, model: Mapping[str, Any], texts: SequenceOf[str], settings: Mapping[str, Any]
    ) -> None:
        logging.getLogger("minipaged").setLevel(logging.ERROR)
        config = EngineConfig(**{"num_blocks": 64, "disable_log_stats": True} | dict(settings))
        self.engine = Engine(PocketExecutor(compute, model, config), config)
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._lines: list[str] = []
        self._trace = TraceLines(self.engine, self._lines.append, texts.__getitem__)

    def add(
        self,
        prompt_token_ids: SequenceOf[int],
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        beams: int = 1,
    ) -> str:
        """Queue a prompt and return its id: beam search if `beams` is above 1, else `n` samples.

        Raises:
            ParamsError: a beam search with samples or a temperature, or what `SamplingParams` refuses.
            RequestTooLongError: the prompt can never run, in the page's terms.
        """
        params: DecodingParams
        if beams > 1:
            if n > 1 or temperature:
                raise ParamsError(
                    f"beams is {beams}, but samples is {n} and temperature is {temperature}; beam search "
                    "does not sample: set samples to 1 and temperature to 0, or beams to 1"
                )
            params = BeamSearchParams(beam_width=beams, num_return_sequences=beams, max_tokens=max_tokens)
        else:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n)
        name = str(self._num_requests)
        try:
            self._requests[name] = self.engine.add_request(name, list(prompt_token_ids), params)
        except RequestTooLongError as error:  # (the page has no settings for the pool)
            advice = "raise num_blocks or kv_cache_memory, or ask for less"
            raise RequestTooLongError(str(error).replace(advice, "shorten the prompt")) from error
        self._num_requests += 1
        return name

    def abort(self, request: str | None = None) -> None:
        """End a request if it still runs; without an id, all."""
        for name in list(self._requests):
            if request is None or name == request:
                self.engine.abort(name)
                del self._requests[name]

    def step(self) -> str:
        """One step, in JSON: `lines` of the trace, `outputs` of each request as token ids, who is `running`
        after it, `more` to do."""
        if self.engine.has_unfinished:
            self.engine.step()
        else:
            self._trace.synchronize("idle")
        lines = self._lines[:]
        self._lines.clear()
        outputs = {
            name: [list(sequence.output_token_ids) for sequence in _answers(request)]
            for name, request in self._requests.items()
        }
        self._requests = {name: r for name, r in self._requests.items() if not r.is_finished}
        fields = {"lines": lines, "outputs": outputs, "running": list(self._requests)}
        return json.dumps({**fields, "more": self.engine.has_unfinished})
