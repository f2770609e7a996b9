"""A forgotten `return`, the commonest mistake in an override, reported where it happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from minipaged.learn.contracts.rules import ContractError, call_text


def with_returns(concept: str, interface: type, contract: type, override: type) -> type:
    """The override, whose methods raise `ContractError` if they return None where something is wanted.

    Left alone are methods that the contract checks itself, and those that answer yes or no: None is false.
    Unlike a breach that a contract finds, such a one is not repeated by later calls.
    """
    wanted: dict[str, str] = {}
    own: dict[str, Any] = {}
    for base in (*override.__mro__, interface):
        is_given = base.__module__.startswith("minipaged.")
        for name, method in vars(base).items():
            if name.startswith("_") or name in vars(contract):
                continue
            if is_given and inspect.isfunction(method):
                wanted.setdefault(name, method.__annotations__["return"])
            own.setdefault(name, None if is_given else method)  # the first is the one that is called

    def checked(name: str) -> Callable[..., Any]:
        method = own[name]

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            answer = method(self, *args, **options)
            if answer is None:
                message = f"{call_text(name, args)} returned None; give {wanted[name]} (is a return missing?)"
                raise ContractError(f"{concept}: {message}")
            return answer

        return call

    names = [name for name, answer in wanted.items() if "None" not in answer and answer != "bool"]
    methods = {name: checked(name) for name in names if inspect.isfunction(own.get(name))}
    names_of_class = {"__slots__": (), "__module__": override.__module__, "__wrapped__": override}
    return type(override.__name__, (override,), {**methods, **names_of_class})
