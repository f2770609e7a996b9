"""What sequences and blocks are called, and which colour they have, in every picture of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from minipaged.viewer.pictures.palette import OWNERS
from minipaged.viewer.snapshot import BlockView, PoolView


def colours(view: PoolView) -> Mapping[str, int]:
    """Name of each sequence -> number of its colour: by request, or by sequence if there is one request."""
    requests = dict.fromkeys(table.request for table in view.tables.values())
    if len(requests) == 1 and len(view.tables) > 1:
        return {name: table.position % len(OWNERS) for name, table in view.tables.items()}
    numbers = {request: colour_of(request, place) for place, request in enumerate(requests)}
    return {name: numbers[table.request] for name, table in view.tables.items()}


def colour_of(request: str, place: int) -> int:
    """The colour of a request: the first for "0" and "A", the second for "1" and "B"; else by its place."""
    if request.isascii() and request.isdigit():
        place = int(request)
    elif len(request) == 1 and "A" <= request <= "Z":
        place = ord(request) - ord("A")
    return place % len(OWNERS)


def colour_of_block(block: BlockView, colour: Mapping[str, int]) -> int | None:
    """The colour of the owners of a block; None if they have several."""
    numbers = {colour[table.name] for table in block.owners}
    return numbers.pop() if len(numbers) == 1 else None


def fill(block: BlockView, colour: Mapping[str, int]) -> str:
    """The class of a block that is in use."""
    number = colour_of_block(block, colour)
    return "shade" if number is None else f"tint{number}"


def labels(view: PoolView) -> Mapping[str, str]:
    """What each sequence is called in a picture: its request, and its number if the request has several."""
    counts = Counter(table.request for table in view.tables.values())
    return {
        name: table.request if counts[table.request] == 1 else f"{table.request}.{table.position + 1}"
        for name, table in view.tables.items()
    }


def owner(block: BlockView, label: Mapping[str, str]) -> str:
    """Who holds a block, in a word: the sequence, or the request of several, or "shared" among requests."""
    requests = {table.request for table in block.owners}
    if len(requests) > 1:
        return "shared"
    return label[block.owners[0].name] if len(block.owners) == 1 else requests.pop()


def holders(block: BlockView, label: Mapping[str, str]) -> str:
    """Who holds a block, in a few letters: "A", "A.1 A.2", "A x 4" (its reference count)."""
    text = " ".join(label[table.name] for table in block.owners)
    if len(text) <= 11:
        return text
    name = owner(block, label)
    return f"\u00d7{block.ref_count}" if name == "shared" else f"{name} \u00d7{block.ref_count}"


def worth_showing(blocks: Sequence[BlockView]) -> int:
    """How many blocks to show: up to the last that is not free."""
    return max((block.block + 1 for block in blocks if block.state != "free"), default=0)
