"""Who runs next: requests, the step plan, the FCFS scheduler, batch policies, preemption. No torch."""

from minipaged.scheduling.limits import RequestTooLongError
from minipaged.scheduling.plan import Event, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.policies import BatchPolicy, ChunkedPrefill, Phases, PrefillFirst
from minipaged.scheduling.preemption import (
    Auto,
    Decision,
    PreemptionCosts,
    PreemptionPolicy,
    Recompute,
    Swap,
)
from minipaged.scheduling.request import (
    Branch,
    DecodingMethod,
    Request,
    RequestState,
    Sample,
    Sequence,
)
from minipaged.scheduling.scheduler import FCFSScheduler

__all__ = [
    "Auto",
    "BatchPolicy",
    "Branch",
    "ChunkedPrefill",
    "Decision",
    "DecodingMethod",
    "Event",
    "FCFSScheduler",
    "Phases",
    "PreemptionCosts",
    "PreemptionPolicy",
    "PrefillFirst",
    "Recompute",
    "Request",
    "RequestState",
    "RequestTooLongError",
    "Sample",
    "ScheduledSequence",
    "Sequence",
    "StepPlan",
    "StepResult",
    "Swap",
]
