"""LLMs that check themselves."""

from __future__ import annotations

from typing import TypeVar

from minipaged import LLM, AsyncLLM

AnyLLM = TypeVar("AnyLLM", LLM, AsyncLLM)


def checked(llm: AnyLLM) -> AnyLLM:
    """The same LLM; its engine checks its invariants after every step."""
    llm.engine.on_committed.append(lambda *step: llm.engine.check_invariants())
    return llm
