"""Lesson 05: how many blocks a sequence gets. Write the methods that raise; the lesson is in lesson.md.

Check with    minipaged learn check 05
Stuck?        minipaged learn hint 05

Every method returns a tuple of block counts to try, in order of preference; with one count, `(3,)`, comma included.
`needed` >= 1 blocks are needed now; `remaining` >= `needed` blocks are all that the sequence could still use until its
last token.
"""


class OnDemand:
    """One block when the last is full (paper, section 4.3)."""

    # -- task 1 ---------------------------------------------------------------------------------

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Just the blocks of the tokens that exist."""
        raise NotImplementedError("Lesson 5, task 1: the blocks of the tokens that exist")

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Just the block of the next token."""
        raise NotImplementedError("Lesson 5, task 1: the block of the next token")


class Reserve:
    """Everything at admission: prompt + max_tokens."""

    # -- task 2 ---------------------------------------------------------------------------------

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """All that the sequence could ever use; otherwise it waits."""
        raise NotImplementedError("Lesson 5, task 2: all that the sequence could ever use")

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Called only for a fork, which gets none of its parent's preallocated blocks: all, else what is needed."""
        raise NotImplementedError("Lesson 5, task 2: all that is left, else what it must have")


class Chunked:
    """Grants of `grant` blocks, then of the bare minimum (text-generation-inference: 16, then 1)."""

    def __init__(self, grant: int = 16) -> None:
        self.grant = grant

    # -- task 3 ---------------------------------------------------------------------------------

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """A whole grant if the pool has it, else what the tokens need."""
        raise NotImplementedError("Lesson 5, task 3: a grant, never more than remaining; then the minimum")

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """A whole grant if the pool has it, else what the next token needs."""
        raise NotImplementedError("Lesson 5, task 3: a grant, never more than remaining; then the minimum")
