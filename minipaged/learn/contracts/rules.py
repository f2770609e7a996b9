"""How a broken contract is told: one line with the concept, the rule and what happened.

    ContractError: allocator: allocate(2) returned [3, 3]; each block may be handed out once

`check_interface` looks at a class before it is used, `Rules` watches an object at work. Paper: none; this
is for whoever writes a part of their own. Knows no concept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn


class ContractError(ValueError):
    """A part broke the contract of its concept; the message names concept, rule and what happened."""


class Rules:
    """Watches the calls to one part. After the first breach every further call repeats it.

    Args:
        concept: its name, the first word of every message.
    """

    def __init__(self, concept: str) -> None:
        self.concept = concept
        self._breach: ContractError | None = None

    def require(self, holds: bool, what: str) -> None:
        """Raise `ContractError` with `what` unless the rule holds."""
        if not holds:
            self.fail(what)

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Raise `ContractError` and remember it."""
        self._breach = ContractError(f"{self.concept}: {what}")
        raise self._breach from cause

    def call(
        self, function: Callable[..., Any], *args: Any, may_raise: type[Exception] | tuple = (), **kw: Any
    ) -> Any:
        """Call the part; an exception that the contract does not know is a breach.

        Raises:
            NotImplementedError: the part is a stub, and says so itself.
        """
        if self._breach is not None:
            raise self._breach
        try:
            return function(*args, **kw)
        except may_raise:
            raise
        except (NotImplementedError, ContractError):
            raise
        except Exception as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise  # raised by this very call: wrong arguments, the caller's fault
            where = _innermost(error)
            self.fail(
                f"{call_text(function, args)} raised {type(error).__name__}: {error} ({where})", cause=error
            )


def call_text(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """A call as a reader would write it, long arguments cut."""
    return f"{getattr(function, '__name__', function)}({', '.join(map(short, args))})"


def short(value: Any) -> str:
    """A value in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _innermost(error: BaseException) -> str:
    frame = inspect.getinnerframes(error.__traceback__)[-1]  # type: ignore[arg-type]
    return f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}"


def check_interface(concept: str, protocol: type, part: Any) -> None:
    """Compare the methods of a class, and their arguments, with those of the contract.

    Raises:
        ContractError: a method is missing, or cannot be called as the contract says.
    """
    name = getattr(part, "__name__", repr(part))
    if not inspect.isclass(part):
        raise ContractError(f"{concept}: {name} is not a class; see {_where(protocol)}")
    wishes = {m: w for base in reversed(protocol.__mro__) for m, w in vars(base).items() if m[0] != "_"}
    for method, wanted in wishes.items():
        found = inspect.getattr_static(part, method, None)
        if isinstance(wanted, property):
            if found is None:
                raise ContractError(f"{concept}: {name} has no attribute {method}; see {_where(protocol)}")
        elif callable(wanted):
            arguments = inspect.signature(wanted).parameters
            text = f"{method}({', '.join(list(arguments)[1:])})"
            if not callable(getattr(part, method, None)):
                raise ContractError(f"{concept}: {name} has no method {text}; see {_where(protocol)}")
            check_arguments(concept, f"{name}.{text}", getattr(part, method), arguments)


def check_arguments(concept: str, text: str, function: Callable[..., Any], wanted: Any) -> None:
    """Raise `ContractError` unless `function` can be called with the arguments `wanted`."""
    given = [a for a, p in wanted.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {a: None for a, p in wanted.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    needed = [a for a in given if wanted[a].default is inspect.Parameter.empty]
    signature = inspect.signature(function)
    required = {a: None for a in keywords if wanted[a].default is inspect.Parameter.empty}
    try:
        signature.bind(*given, **keywords)
        signature.bind(*needed, **required)
    except TypeError as error:
        raise ContractError(
            f"{concept}: {text} is what the contract calls, but it is declared with {signature} ({error})"
        ) from None


def _where(protocol: type) -> str:
    return f"{protocol.__name__} in {protocol.__module__}"
