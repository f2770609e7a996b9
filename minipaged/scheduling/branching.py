"""Branches become fork, append and free: all that a decoding method needs of memory (paper, section 4.4).

    branches   A+x  A+y  C+z              B has none: freed
    live       A    A'   C                A' is forked from A before anything is appended

Knows tables only through the manager; which branches there are is the decoding method's business.
"""

from __future__ import annotations

from minipaged.memory import KVManager
from minipaged.scheduling.request import Branch, Request, RequestState, Sequence


def apply_branches(request: Request, branches: list[Branch], kv: KVManager) -> None:
    """Continue a request with the branches its decoding method chose; without a live one it is finished."""
    if len(branches) == 1 and len(request.sequences) == 1:
        branch = branches[0]
        branch.parent.append(branch)
        if branch.finish_reason is not None:
            finish(request, kv)
        return
    # Fork before anything is appended: every branch starts from its parent as it was.
    live: list[Sequence] = []
    ended: list[Sequence] = []
    for branch in branches:
        if branch.finish_reason is not None:
            ended.append(branch.parent.branch(kv.new_table()))
        elif branch.parent in live:
            live.append(branch.parent.branch(kv.fork(branch.parent)))
        else:
            live.append(branch.parent)
    children = (iter(live), iter(ended))
    for branch in branches:
        next(children[branch.finish_reason is not None]).append(branch)
    kv.free(sequence for sequence in request.sequences if sequence not in live)
    request.sequences = live
    request.completions += ended
    if not live:
        request.state = RequestState.FINISHED


def finish(request: Request, kv: KVManager) -> None:
    """The live sequences become completions as they are; every block comes back."""
    request.completions += request.sequences
    kv.free(request.sequences)
    request.sequences = []
    request.state = RequestState.FINISHED
