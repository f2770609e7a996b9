"""vLLM's classes, methods and arguments that are not here: the error says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from minipaged.prompts import RequestError, shortened

P = ParamSpec("P")
T = TypeVar("T")

DROP = "drop it"
MERGE = "merge the adapter into the model's weights, and load that model"
MODEL = "its model is llm.engine.executor.model"
TEXT_ONLY = "minipaged only generates text"


def _names(text: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), instead)


IMPORTS = {
    **_names("EngineArgs LLMEngine", "give the settings to LLM(...), whose engine is .engine"),
    **_names("AsyncEngineArgs AsyncLLMEngine", "give the settings to AsyncLLM(...), whose engine is .engine"),
    **_names(
        """ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput
        PoolingOutput PoolingParams PoolingRequestOutput ScoringOutput ScoringRequestOutput""",
        TEXT_ONLY,
    ),
    "GuidedDecodingParams": "give structured_outputs=StructuredOutputsParams(...)",
    "LoRARequest": MERGE,
    "LogitsProcessor": "give functions in SamplingParams",
    "ModelRegistry": "register the model with transformers' AutoConfig and AutoModelForCausalLM",
    "PromptType": "use minipaged.prompts.Prompt",
}
"""Names in vLLM's package."""

METHODS = {
    **_names("classify embed encode reward score", TEXT_ONLY),
    **_names("reset_encoder_cache reset_mm_cache sleep start_profile stop_profile wake_up", DROP),
    **_names("apply_model collective_rpc", MODEL),
    **_names("add_lora list_loras remove_lora", MERGE),
    **_names("check_health errored is_stopped", "use is_running of AsyncLLM"),
    **_names("enqueue enqueue_chat wait_for_completion", "use AsyncLLM"),
    **_names("get_model_config model_config vllm_config", f"use llm.engine.config; {MODEL}"),
    "dead_error": "use stopped of AsyncLLM",
    "get_metrics": "use llm.engine.metrics",
    "llm_engine": "use llm.engine",
    "preprocess_chat": "use chat_prompt",
    "set_tokenizer": "give tokenizer to LLM(...)",
    "update_weights": "build another LLM",
}
"""Names in vLLM's `LLM` and `AsyncLLM`."""

ARGUMENTS: dict[str, tuple[Any, str]] = {
    "chat_template_content_format": ("auto", "drop it: the parts of a message are joined by newlines"),
    "concurrency_limit": (None, "give max_num_seqs to LLM(...)"),
    "lora_request": (None, MERGE),
    "mm_processor_kwargs": (None, TEXT_ONLY),
    "priority": (0, "drop it: requests are admitted in order of arrival"),
    "prompt_token_ids": (None, 'give prompts={"prompt_token_ids": [...]}'),
    "tokenization_kwargs": (None, "give token ids"),
    **dict.fromkeys(("data_parallel_rank", "trace_headers"), (None, DROP)),
    **dict.fromkeys(("reset_connector", "reset_running_requests"), (False, DROP)),
}
"""Arguments of these -> vLLM's default, which asks for nothing (as does None), and what to do instead."""


def without_vllm_arguments(method: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the method accepts vLLM's arguments that ask for nothing; others raise RequestError."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> T:
        for name in [name for name in options if name in ARGUMENTS]:
            value: Any = options.pop(name)
            default, instead = ARGUMENTS[name]
            if value is not None and (type(value), value) != (type(default), default):
                raise RequestError(f"{name} is {shortened(value)}, which is not supported; {instead}")
        return method(*args, **options)

    return call


class NamesOfVllm:
    """A base class whose errors about missing attributes name what to use instead."""

    if not TYPE_CHECKING:  # (mypy would take any name for one that is here)

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in METHODS:
                message += f"; {METHODS[name]}"
            raise AttributeError(message, name=name, obj=self)
