"""Metrics for Prometheus: vLLM's names and buckets with the prefix `minipaged:`, and the paper's own
quantities.

Counters and gauges are read from the engine on request; a step hook fills the histograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minipaged.engine import Engine
from minipaged.scheduling import Request, StepPlan, StepResult
from minipaged.serving.answers import Answers

SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TO_FIRST),
    "inter_token_latency_seconds": ("Between two tokens of a request.", BETWEEN),
    "e2e_request_latency_seconds": ("From arrival to the end.", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", SECONDS),
    "request_inference_time_seconds": ("From the first step to the end.", SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the end.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", TOKENS),
    "iteration_tokens_total": ("Tokens computed in a step.", PER_STEP),
}


class PrometheusMetrics:
    """The metrics of an engine.

    Args:
        engine: whose steps are watched from now on.
        model_name: the label `model_name`.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._preemptions: Counter[str] = Counter()  # by mode
        self.answers = Answers()
        self._registry = CollectorRegistry()
        for collector in (self, self.answers):
            self._registry.register(collector)  # type: ignore[arg-type]
        self._histograms = {
            name: Histogram(
                f"minipaged:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            ).labels(model_name)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        # (Before the engine's own hook, which sets a request's times to this step's.)
        engine.on_committed.insert(0, self._observe)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges, as prometheus_client asks for them."""
        metrics, scheduler = self._engine.metrics, self._engine.scheduler
        kv = scheduler.kv
        gauges = {
            "num_requests_running": ("Requests that hold device blocks.", len(scheduler.running)),
            "num_requests_waiting": ("Requests in the queue.", len(scheduler.waiting)),
            "num_requests_swapped": ("Requests whose blocks are on the host.", len(scheduler.swapped)),
            "kv_cache_usage_perc": (
                "Share of the blocks that tables hold.",
                kv.num_used / kv.allocator.num_blocks,
            ),
            "kv_cache_waste_perc": ("Share of held slots without a token, average.", metrics.kv_waste),
            "kv_cache_sharing_perc": ("Share of blocks saved by sharing, average.", metrics.sharing_saving),
        }
        counters = {
            "num_preemptions": ("Preemptions.", metrics.num_preemptions),
            "prompt_tokens": ("Prompt tokens admitted.", metrics.prompt_tokens),
            "generation_tokens": ("Tokens generated.", metrics.generation_tokens),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                metrics.prefix_cache_queries,
            ),
            "prefix_cache_hits": ("Prompt tokens found there.", metrics.prefix_cache_hits),
            "spec_decode_num_draft_tokens": ("Draft tokens.", metrics.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", metrics.accepted_tokens),
            "copied_blocks": ("Blocks copied on write.", metrics.blocks_copied),
            "engine_steps": ("Steps committed.", metrics.steps),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in values.items():
                family = kind(f"minipaged:{name}", text, labels=["model_name"])
                family.add_metric([self._model_name], value)
                yield family
        reasons = dict.fromkeys(("stop", "length", "abort", "error"), 0) | dict(metrics.request_success)
        yield self._counter("request_success", "Requests that ended.", "finished_reason", reasons)
        modes = {"recompute": 0, "swap": 0} | dict(self._preemptions)
        yield self._counter("preemptions_by_mode", "Preemptions by how they come back.", "mode", modes)
        swapped = {"out": metrics.blocks_swapped_out, "in": metrics.blocks_swapped_in}
        yield self._counter("swapped_blocks", "Blocks moved to the host and back.", "direction", swapped)

    def _counter(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"minipaged:{name}", text, labels=["model_name", label])
        for value, count in values.items():
            family.add_metric([self._model_name, value], count)
        return family

    def _observe(self, plan: StepPlan, result: StepResult, touched: list[Request]) -> None:
        now = self._engine.clock()
        put = self._histograms
        put["iteration_tokens_total"].observe(plan.num_tokens)
        for event in plan.events:
            if event.kind == "preempted":
                self._preemptions[event.detail["mode"]] += 1
        for request in plan.sampling:
            if request.error is not None:
                continue  # no token of it was valid
            last = request.times.get("last_token")
            if last is None:
                put["time_to_first_token_seconds"].observe(now - request.arrival_time)
            else:
                put["inter_token_latency_seconds"].observe(now - last)
        for request in touched:
            if request.is_finished:
                self._observe_end(request, now)

    def _observe_end(self, request: Request, now: float) -> None:
        scheduled = request.times.get("scheduled", now)
        first = request.times.get("first_token", now)
        values = {
            "e2e_request_latency_seconds": now - request.arrival_time,
            "request_queue_time_seconds": scheduled - request.arrival_time,
            "request_inference_time_seconds": now - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": now - first,
            "request_prompt_tokens": len(request.prompt_token_ids),
            "request_generation_tokens": sum(s.num_generated_tokens for s in request.completions),
        }
        for name, value in values.items():
            self._histograms[name].observe(value)
