"""Who runs next: requests, the step plan, the FCFS scheduler, batch policies, preemption. No torch."""

from minipaged.scheduling.base import RequestTooLongError, Scheduler
from minipaged.scheduling.chunked_prefill import ChunkedPrefill
from minipaged.scheduling.fcfs import BatchPolicy, FCFSScheduler
from minipaged.scheduling.plan import Chunk, Event, Sample, StepPlan, StepResult
from minipaged.scheduling.preemption import (
    Auto,
    Decision,
    PreemptionCosts,
    PreemptionPolicy,
    Recompute,
    Swap,
)
from minipaged.scheduling.prefill_first import PrefillFirst
from minipaged.scheduling.request import (
    Branch,
    DecodingMethod,
    Request,
    RequestState,
    Sequence,
)

__all__ = [
    "Auto",
    "BatchPolicy",
    "Branch",
    "Chunk",
    "ChunkedPrefill",
    "Decision",
    "DecodingMethod",
    "Event",
    "FCFSScheduler",
    "PreemptionCosts",
    "PreemptionPolicy",
    "PrefillFirst",
    "Recompute",
    "Request",
    "RequestState",
    "RequestTooLongError",
    "Sample",
    "Scheduler",
    "Sequence",
    "StepPlan",
    "StepResult",
    "Swap",
]
