"""PagedAttention as code to learn from and to generate with.

    from minipaged import LLM, SamplingParams
    LLM().generate("Once upon a time", SamplingParams(max_tokens=64))

The names below are loaded when they are first used, so that `minipaged.memory` and
`minipaged.scheduling` import without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.config import EngineConfig
    from minipaged.decoding.params import BeamSearchParams, SamplingParams
    from minipaged.decoding.structured import StructuredOutputsParams
    from minipaged.llm import LLM
    from minipaged.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

_HOME = {
    "BeamSearchParams": "minipaged.decoding.params",
    "CompletionOutput": "minipaged.outputs",
    "EngineConfig": "minipaged.config",
    "LLM": "minipaged.llm",
    "RequestOutput": "minipaged.outputs",
    "SamplingParams": "minipaged.decoding.params",
    "StructuredOutputsParams": "minipaged.decoding.structured",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
