"""A module of a third-party model gets a method of ours: its class becomes a subclass of what it was.

Other modules of that class stay as they are, nothing refers to itself, and it can be undone.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Adopted:
    """A module of class `own_class`, some of whose methods are ours."""

    own_class: type[nn.Module]


def adopt(module: nn.Module, kind: type[Adopted], **more: Any) -> None:
    """Make the methods of `kind` override the module's own; `more`: attributes of its new class."""
    own = type(module)
    attributes = {"__module__": own.__module__, "own_class": own, **more}
    module.__class__ = type(own.__name__, (kind, own), attributes)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether its class is one of transformers' models, and not of code that comes with a model."""
    return type(module).__module__.startswith("transformers.models.")


def give_back(module: nn.Module) -> None:
    """Undo `adopt`, if the module was adopted."""
    if isinstance(module, Adopted):
        module.__class__ = module.own_class  # type: ignore[assignment]
