"""How a broken contract is reported: one line with the concept, the rule and what happened.

ContractError: allocator: allocate(2) returned [3, 3]; each block may be handed out once
"""

from __future__ import annotations

import inspect
import os
import re
import site
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from minipaged.text_io import cut

NOT_OWN = (
    f"{Path(__file__).parents[2]}{os.sep}",
    *site.getsitepackages(),
    *filter(None, [site.getusersitepackages()]),  # (None in a browser)
    os.path.dirname(os.__file__),
    "<",
)
"""How files begin that are not the override's: an exception inside them names the line that called them."""


class ContractError(ValueError):
    """An override broke the contract of its concept; the message names concept, rule and what happened."""


class Rules:
    """Judges the calls to one override of `concept`. After the first breach every further call repeats it:
    what the override holds may be wrong, also for a request that would not have met the breach.
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
        in_one_line = re.sub(r"\s*\n\s*", " ", what)
        self._breach = ContractError(f"{self.concept}: {in_one_line}")
        raise self._breach from cause

    def call(
        self, function: Callable[..., Any], *args: Any, may_raise: tuple[type[Exception], ...] = (), **kw: Any
    ) -> Any:
        """Call the override; an exception that the contract does not allow is a breach, a stub's is not."""
        if self._breach is not None:
            if sys.exception() is self._breach:  # somebody cleans up after it
                raise self._breach
            raise ContractError(
                f"{self._breach} (reported before; correct the class and load it anew)"
            ) from self._breach
        try:
            return function(*args, **kw)
        except (*may_raise, NotImplementedError, ContractError):  # type: ignore[misc]
            raise
        except (Exception, SystemExit) as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise  # raised by this very call: wrong arguments, the caller's fault
            frames = inspect.getinnerframes(error.__traceback__)  # type: ignore[arg-type]
            frame = ([frame for frame in frames if not frame.filename.startswith(NOT_OWN)] or frames)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            name = getattr(function, "__name__", str(function))
            what = args[1] if function is getattr else call_text(name, args)
            self.fail(f"{what} raised {error_text(error)} ({where})", cause=error)

    def make(self, make: Callable[..., Any], *args: Any) -> Any:
        """Make an object of the override; arguments that it does not take are a breach."""
        try:
            return self.call(make, *args)
        except TypeError as error:  # (`call` reports one from inside)
            made = call_text(getattr(make, "__name__", str(make)), args)
            self.fail(f"the engine calls {made}, but {error}", cause=error)


class Watcher:
    """Stands between the engine and an override; a subclass has rules, everything else is passed on."""

    def __init__(self, concept: str, make: Callable[..., Any], *args: Any) -> None:
        self.rules = Rules(concept)
        self.require = self.rules.require
        self._inner = self.rules.make(make, *args)

    def _call(self, name: str, *args: Any, may_raise: tuple[type[Exception], ...] = ()) -> Any:
        return self.rules.call(getattr(self._inner, name), *args, may_raise=may_raise)

    def __getattr__(self, name: str) -> Any:
        value = self.rules.call(getattr, self._inner, name)
        return partial(self.rules.call, value) if inspect.ismethod(value) else value


def call_text(name: str, args: tuple[Any, ...]) -> str:
    """A call as a reader would write it, long arguments cut."""
    return f"{name}({', '.join(map(short, args))})"


def short(value: Any) -> str:
    """A value in at most 60 characters; of a tensor its shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    return cut(without_addresses(repr(value)), most=60)


def error_text(error: BaseException) -> str:
    """The kind of an exception, and its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def without_addresses(text: str) -> str:
    """A text in which objects have no modules and addresses: `<BlockTable>`."""
    return re.sub(r"<(?:\w+\.)*(\w+) object (?:\S+ )?at 0x\w+>", r"<\1>", text)


def check_interface(concept: str, interface: type, override: Any) -> None:
    """Raise `ContractError` if a class lacks methods of the interface, or their arguments differ."""
    name = getattr(override, "__name__", repr(override))
    is_class = Protocol not in interface.__bases__
    where = f"see {interface.__name__} in {interface.__module__}"
    if not inspect.isclass(override):
        raise ContractError(f"{concept}: {name} is not a class; {where}")
    where += ", from which yours can inherit it" if is_class else ""
    names = (n for base in interface.__mro__ for n in vars(base) if n[0] != "_")
    wanted = {n: inspect.getattr_static(interface, n) for n in names}
    properties = [n for n, value in wanted.items() if isinstance(value, property)]
    methods = {n: inspect.signature(f).parameters for n, f in wanted.items() if inspect.isfunction(f)}
    texts = {n: f"{n}({', '.join(map(_shown, list(ps.values())[1:]))})" for n, ps in methods.items()}
    lacking = {
        "method": [text for n, text in texts.items() if not callable(getattr(override, n, None))],
        "attribute": [n for n in properties if inspect.getattr_static(override, n, None) is None],
    }
    if any(lacking.values()):
        what = " and no ".join(f"{kind} {', '.join(these)}" for kind, these in lacking.items() if these)
        raise ContractError(f"{concept}: {name} has no {what}; {where}")
    for n in properties:
        if inspect.isfunction(inspect.getattr_static(override, n)):
            raise ContractError(f"{concept}: {name}.{n} is a method; make it a property (with @property)")
    for n, arguments in methods.items():
        if isinstance(inspect.getattr_static(override, n), (staticmethod, classmethod)):
            arguments = dict(list(arguments.items())[1:])  # type: ignore[assignment]
        check_arguments(concept, f"{name}.{texts[n]}", getattr(override, n), arguments)
    if is_class:
        _check_order(concept, name, list(inspect.signature(interface).parameters), override)


def _shown(parameter: inspect.Parameter) -> str:
    """`count`, or `count=1` if it may be left out."""
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def _check_order(concept: str, name: str, wanted: Sequence[str], override: type) -> None:
    """Raise `ContractError` if the constructor has arguments of the interface's in another order."""
    signature = inspect.signature(override)
    given = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    known = [argument for argument in given if argument in wanted]
    if known != sorted(known, key=wanted.index):
        raise ContractError(
            f"{concept}: {name} is declared with {signature}, but the order is {', '.join(wanted)}; change it"
        )


def check_arguments(concept: str, text: str, function: Callable[..., Any], wanted: Any) -> None:
    """Raise `ContractError` unless `function` can be called with the arguments `wanted`."""
    keyword_only = {a for a, p in wanted.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    needed = [a for a, p in wanted.items() if p.default is inspect.Parameter.empty]
    signature = inspect.signature(function)
    try:
        for names in (list(wanted), needed):
            keywords = keyword_only.intersection(names)
            signature.bind(*[a for a in names if a not in keywords], **dict.fromkeys(keywords))
    except TypeError as error:
        raise ContractError(
            f"{concept}: the contract calls {text}, but it is declared with {signature} ({error})"
        ) from None
