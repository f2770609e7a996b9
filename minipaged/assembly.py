"""What an `LLM` consists of, chosen and loaded as its arguments say.

config   ->  components (a user's classes among them)  --+
model    ->  executor, tokenizer, sampling defaults    --+->  engine
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from minipaged import pocket_model
from minipaged.components import Components, check_drafts
from minipaged.config import ConfigError, EngineConfig
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.params import SamplingParams
from minipaged.decoding.speculation import PromptLookup
from minipaged.engine import Engine
from minipaged.execution.executor import Executor
from minipaged.learn.overrides import components_from
from minipaged.prompts import shortened


class Parts(NamedTuple):
    """What `assemble` returns."""

    engine: Engine
    tokenizer: Any
    """None: prompts are token ids."""
    sampling_params: SamplingParams
    """For requests without parameters."""


def assemble(
    config: EngineConfig,
    model: str | Path | None,
    tokenizer: Any = None,
    executor: Executor | None = None,
    use: Mapping[str, Any] | None = None,
    components: Components | None = None,
) -> Parts:
    """An engine and what belongs to it; the arguments are those of `LLM`, which also lists the errors."""
    if not isinstance(model, str | PathLike | None) or model == "":
        raise ConfigError(f"model is {model!r}; give a model directory, a GGUF file or a hub id")
    components = choose_components(config, use, components)
    name = pocket_model.located(model)
    tokenizer = choose_tokenizer(config, tokenizer)
    if executor is None:
        import_executors()
    draft_model = None
    if config.speculative_model is not None:
        from minipaged.execution.draft_model import DraftModel

        draft_model = DraftModel.load(pocket_model.located(config.speculative_model), config)
    recommended: Mapping[str, Any] = {}
    with ExitStack() as undo:
        if executor is None:
            executor, tokenizer, recommended = load_runner(config, name, tokenizer, undo)
        else:
            check_settings(config, executor, model)
        if draft_model is not None:
            draft_model.draft_for(executor, tokenizer)
            components = replace(components, drafter=lambda: draft_model)
        if components.paged_attention is not None:
            # Only executors with kernels have this; a simulation has no attention to replace.
            attending: Any = executor
            attending.use_attention(components.paged_attention)
        engine = Engine(executor, config, tokenizer, components)
        parts = Parts(engine, tokenizer, default_params(recommended, name))
        undo.pop_all()
    return parts


def choose_components(
    config: EngineConfig, use: Mapping[str, Any] | None, components: Components | None
) -> Components:
    """The classes that one of `use` and `components` names; ConfigError if they do not fit the config."""
    if use and components is not None:
        raise ConfigError("use and components are both given; give only one of them")
    if not isinstance(components, Components | None):
        raise ConfigError(f"components is {shortened(components)}; give Components(...), or use={{...}}")
    components = components or components_from(use or {})
    if components.drafter is not PromptLookup:
        if config.speculative_model is not None:
            raise ConfigError("speculative_model and a drafter are both given; give only one of them")
        if not config.num_speculative_tokens:
            raise ConfigError("a drafter is given, but num_speculative_tokens is 0; give e.g. 4")
    check_drafts(config, components)
    return components


def choose_tokenizer(config: EngineConfig, tokenizer: Any) -> Any:
    """The tokenizer that the user gave, loaded if it is a name; None: the model's own."""
    if isinstance(tokenizer, str | Path):
        from minipaged.execution import loading

        # (It is not the model's own, so `revision` does not apply to it.)
        return loading.load_tokenizer(str(tokenizer), replace(config, revision=None), must_exist=True)
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"tokenizer is {tokenizer!r}; give a directory, a hub id or a tokenizer")
    return tokenizer


_importing = Lock()


@cache
def import_executors() -> None:
    """Import torch, transformers and what needs them.

    Garbage collections on the way would take a fifth of the time and find next to nothing. The one at the end
    frees the frames that torch leaves in reference cycles: they would keep the LLM that is being built alive.
    """
    with _importing:  # (or another thread would find the collector off, and leave it so)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            import minipaged.execution.model_runner  # noqa: F401
        finally:
            if was_enabled:
                gc.enable()
        gc.collect()


def load_runner(
    config: EngineConfig, name: str, tokenizer: Any, undo: ExitStack
) -> tuple[Executor, Any, Mapping[str, Any]]:
    """The executor of a model, its tokenizer unless one is given, and the sampling that it recommends.

    `undo` ends its other ranks, if any: a traceback that is kept would keep them, and refuse the next LLM.
    """
    from minipaged.execution import loading, model_config
    from minipaged.execution.model_runner import ModelRunner
    from minipaged.execution.overlap import OverlapRunner

    if config.num_ranks > 1:
        from minipaged.execution.distributed import start

        runner: ModelRunner = undo.enter_context(closing(start.load(name, config)))
    else:
        overlaps = config.async_scheduling and loading.find_device(config.device).type == "cuda"
        runner = (OverlapRunner if overlaps else ModelRunner).load(name, config)
    if tokenizer is None:
        tokenizer = loading.load_tokenizer(name, config)
    sampler: Any = runner.sampler
    ends = model_config.end_of_text(runner.model, runner.vocab_size, tokenizer)
    sampler.eos_token_ids = runner.eos_token_ids = ends
    return runner, tokenizer, model_config.recommended_sampling(runner.model)


def check_settings(config: EngineConfig, executor: Executor, model: str | Path | None) -> None:
    """Raise ConfigError for an invalid executor, or a setting that contradicts one that is already built."""
    if model is not None:
        raise ConfigError(f"model is {str(model)!r}, but the executor has one; leave it out")
    for name in (*Executor.__annotations__, "execute"):
        if not hasattr(executor, name):
            raise ConfigError(
                f"executor is {shortened(executor)}, which has no {name}; give an Executor "
                "(see minipaged/execution/executor.py)"
            )
    for name in ("num_blocks", "max_model_len"):
        wanted, has = getattr(config, name), getattr(executor, name)
        if wanted not in (None, has):
            raise ConfigError(
                f"{name} is {wanted}, but the executor has {has}; make an executor that has {wanted}"
            )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ConfigError(f"{name} is {size}, but an executor of your own is one rank; leave it out")


def default_params(recommended: Mapping[str, Any], model: str) -> SamplingParams:
    """`SamplingParams` with what the model's generation_config.json recommends; may raise ConfigError."""
    try:
        return SamplingParams(**recommended)
    except ParamsError as error:
        raise ConfigError(
            f"generation_config.json of {model} has defaults that cannot be used: {error}; fix it, or set "
            'generation_config="none" (--generation-config none)'
        ) from error
