"""Classes of your own in place of the project's: `--use CONCEPT=FILE.py:Class`, `LLM(use={...})`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from minipaged.components import Components
from minipaged.learn.contracts import CONCEPTS, Concept
from minipaged.learn.contracts.policies import make_preemption
from minipaged.learn.lessons import is_untouched

logger = logging.getLogger(__name__)


class OverrideError(ValueError):
    """A class that cannot be found or loaded; the message names it and the fix."""


def components_from(use: Mapping[str, Any], watch: bool = True) -> Components:
    """The project's components, some overridden by a class (or function) or "FILE.py:Class".

    With `watch`, their contracts are checked at every call.

    Raises `OverrideError` if one cannot be loaded, `ContractError` if it lacks a method of its contract.
    """
    if not isinstance(use, Mapping):
        raise OverrideError(f'use is {use!r}; give a dict like {{"allocator": "FILE.py:Class"}}')
    overrides = {}
    for name, given in use.items():
        concept = concept_of(name)
        override = exercise_class(name, given) if isinstance(given, str) else given
        concept.check(override)
        if watch and not getattr(override, "__module__", "").startswith("minipaged."):
            override = concept.watch(override)
        elif name == "preemption":
            override = partial(make_preemption, override)
        elif name == "paged_attention" and inspect.isclass(override):
            override = override()
        overrides[name] = override
    return Components(**overrides)


def exercise_class(concept: str, where: str) -> Any:
    """What "FILE.py:Class" names; of an exercise in which nothing is written yet, the project's own.

    Raises:
        OverrideError: no such concept, file or class, or the file fails.
    """
    file, _, name = where.rpartition(":")
    own = next((own for own in concept_of(concept).originals if own.__name__ == name), None)
    if own is not None and is_untouched(Path(file).absolute()):
        logger.warning("%s has not been started, so the project's own %s is used", file, name)
        return own
    return load_override(where)


def concept_of(name: str) -> Concept:
    """The concept of a name. Raises `OverrideError` for an unknown one."""
    if name in CONCEPTS:
        return CONCEPTS[name]
    near = difflib.get_close_matches(name, CONCEPTS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(CONCEPTS)}"
    raise OverrideError(f"unknown concept {name!r}; {hint}")


def parse_use(values: Iterable[str]) -> dict[str, str]:
    """Read `--use` options; raises `OverrideError` if one cannot be read or a concept is given twice."""
    use: dict[str, str] = {}
    for name, where in map(parse_option, values):
        if name in use:
            raise OverrideError(f"--use {name} is given twice: {use[name]} and {where}; drop one")
        use[name] = where
    return use


def parse_option(value: str) -> tuple[str, str]:
    """Concept and place of one `--use` option. Raises `OverrideError` if it cannot be read."""
    name, equals, where = value.partition("=")
    if not equals or ":" not in where:
        raise OverrideError(
            f"--use {value} is not CONCEPT=FILE.py:Class; give e.g. allocator=mine.py:MyAllocator"
        )
    return concept_of(name).name, where


def load_override(where: str) -> Any:
    """Load "FILE.py:Class"; raises `OverrideError` if there is no such file or class, or the file fails."""
    file, colon, name = where.rpartition(":")
    if not colon or not name:
        raise OverrideError(f"{where!r} names no class; give FILE.py:Class")
    module = _load_file(Path(file))
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        if not known:
            raise OverrideError(f"{file} has no {name}; define it there")
        raise OverrideError(f"{file} has no {name}; it defines {', '.join(known)}; give one of those")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise OverrideError(f"there is no file {path}; give the path from where you are ({Path.cwd()})")
    if path.suffix != ".py":
        raise OverrideError(f"{path} is not a Python file; give one whose name ends in .py")
    name = "override_" + "_".join(path.resolve().with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise OverrideError(
                f"{path} needs {error.name}, which is not installed; install it, or correct the import"
            ) from error
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        kind, reason = type(error).__name__, str(getattr(error, "msg", error))
        message = f"{kind}: {reason}" if reason else kind
        raise OverrideError(f"{where} cannot be loaded: {message}; fix the file") from error
    return module
