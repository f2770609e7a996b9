"""The paper's worked examples (sections 4.2 to 4.4), played by the real allocator and block tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minipaged.memory import BlockAllocator, BlockTable
from minipaged.viewer.snapshot import PoolView, TableView, view_of

SIZE = 4
SCORE = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought"]
BEST = ["It", "was", "the", "best", "of", "times"]
WORDS = tuple(dict.fromkeys((*SCORE, *BEST, "mothers")))

Tables = Mapping[str, tuple[BlockTable, Iterable[str]]]


class Moment(NamedTuple):
    """What has just happened, and the memory then."""

    caption: str
    view: PoolView


def text_of(token: int) -> str:
    """The word of a token of these scenes."""
    return WORDS[token]


def moment(caption: str, allocator: BlockAllocator, tables: Tables, prompt: int = 0) -> Moment:
    """Look at tables without a scheduler: name ("A" or "A/1") -> table and its words, the prompt first."""
    views = []
    for name, (table, words) in tables.items():
        request, _, position = name.partition("/")
        tokens = tuple(WORDS.index(word) for word in words)
        blocks, number = tuple(table.blocks), table.num_tokens
        views.append(TableView(request, int(position or 0), False, blocks, number, number, prompt, tokens))
    return Moment(caption, view_of(views, SIZE, allocator.num_blocks))


def fig4() -> dict[str, BlockTable]:
    """The block tables of two requests, which every rank follows."""
    pool = BlockAllocator(9, order=(7, 1, 5, 3, 2))
    tables = {"A": BlockTable(pool, SIZE), "B": BlockTable(pool, SIZE)}
    tables["A"].append(7)
    tables["B"].append(5)
    tables["A"].append(2)
    return tables


def fig6() -> list[Moment]:
    """A prompt of 7 tokens in blocks 7 and 1, then two generated tokens; the second takes block 3."""
    pool = BlockAllocator(9, order=(7, 1, 3))
    table = BlockTable(pool, SIZE)

    def after(count: int, caption: str) -> Moment:
        table.append(count)
        return moment(caption, pool, {"A": (table, SCORE[: table.num_tokens])}, 7)

    return [
        after(7, "The prompt: 7 tokens, 2 blocks"),
        after(1, "\u201cfathers\u201d goes to the free slot of block 1"),
        after(1, "Block 1 is full: \u201cbrought\u201d takes block 3"),
    ]


def fig7() -> list[Moment]:
    """A second request shares the pool; its blocks lie wherever there was room."""
    pool = BlockAllocator(9, order=(7, 1, 5, 2, 3))
    first, second = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    first.append(7)
    second.append(5)
    first.append(2)
    second.append(1)
    tables = {"A": (first, SCORE), "B": (second, BEST)}
    return [moment("Two requests, one pool of blocks", pool, tables)]


def fig8() -> list[Moment]:
    """Two samples of a prompt: the blocks are shared until one of them writes (copy-on-write)."""
    pool = BlockAllocator(9, order=(7, 1, 3))
    first = BlockTable(pool, SIZE)
    first.append(7)
    second = first.fork()
    prompt = SCORE[:7]

    def now(caption: str, *words: str) -> Moment:
        texts = ([*prompt, *words[:1]], [*prompt, *words[1:]])
        return moment(caption, pool, {"A/0": (first, texts[0]), "A/1": (second, texts[1])}, 7)

    moments = [now("Two samples share the prompt")]
    first.append()
    moments.append(now("Sample 1 writes: block 1 is copied to block 3", "fathers"))
    second.append()
    moments.append(now("Sample 2 is alone in block 1 and writes in place", "fathers", "mothers"))
    return moments


def fig9() -> list[Moment]:
    """Beam search, k = 4: the best candidates continue beams 2 and 3; blocks 2, 4, 5 and 8 become free."""
    pool = BlockAllocator(13)
    first = BlockTable(pool, SIZE)
    first.append(SIZE)
    last = first.fork()
    for _ in range(2):
        for table in (first, last):
            table.append(SIZE)
    beams = [first, first.fork(), first.fork(), last]
    for table in beams:
        table.append(SIZE)
    before = moment("Four beams: 1, 2 and 3 share three blocks", pool, _named(beams))
    children = [beams[1], beams[1].fork(), beams[2], beams[2].fork()]
    # The figure numbers the new blocks 9 to 12: they are taken before the others are given back.
    for table in children:
        table.append(SIZE)
    for table in (beams[0], beams[3]):
        table.free()
    return [before, moment("One step later: all continue beams 2 and 3", pool, _named(children))]


def _named(beams: list[BlockTable]) -> Tables:
    return {f"beam/{i}": (table, ()) for i, table in enumerate(beams)}
