"""vLLM's classes and methods that are not here: the error says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

TEXT_ONLY = "minipaged only generates text"

IMPORTS = {
    **dict.fromkeys(("EngineArgs", "LLMEngine"), "give the settings to LLM(...), whose engine is .engine"),
    **dict.fromkeys(
        ("AsyncEngineArgs", "AsyncLLMEngine"), "give the settings to AsyncLLM(...), whose engine is .engine"
    ),
    "GuidedDecodingParams": "give structured_outputs=StructuredOutputsParams(...)",
    "PoolingParams": TEXT_ONLY,
}
"""Names in vLLM's package."""

METHODS = {
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), TEXT_ONLY),
    **dict.fromkeys(("sleep", "start_profile", "stop_profile", "wake_up"), "drop it"),
    **dict.fromkeys(("apply_model", "collective_rpc"), "its model is llm.engine.executor.model"),
    "check_health": "use is_running of AsyncLLM",
    "enqueue": "use AsyncLLM",
    "get_metrics": "use llm.engine.metrics",
    "llm_engine": "use llm.engine",
}
"""Names in vLLM's `LLM` and `AsyncLLM`."""


class NamesOfVllm:
    """A base class whose missing attributes are told with what to use instead."""

    if not TYPE_CHECKING:  # (mypy would take any name for one that is here)

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in METHODS:
                message += f"; {METHODS[name]}"
            raise AttributeError(message, name=name, obj=self)
