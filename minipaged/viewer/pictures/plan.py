"""What one step does: how its token budget is spent, and which blocks move.

    budget 48  |d|d|d|  prefill B 20   |  prefill C 12 |    left    |     + 16 cached: not computed

A chunk that samples from a single token is a decode, any other a prefill (or a recomputation). Draws a
`StepPlan`, or a step of a trace; both have chunks, moves and events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minipaged.viewer.delta import ChunkLine
from minipaged.viewer.pictures.names import colour_of
from minipaged.viewer.pictures.svg import Picture, Svg, text_width

MARGIN, BAR, WIDTH = 18, 34, 720


class Share(NamedTuple):
    """A part of the step's tokens.

    Attributes:
        kind: "decode", "prefill" or "cached".
        request: whose tokens.
        num_tokens: how many.
    """

    kind: str
    request: str
    num_tokens: int


def shares(chunks: Sequence[ChunkLine], events: Sequence[Mapping[str, Any]]) -> list[Share]:
    """Decodes first, then prefills, then what the prefix cache made unnecessary; one part a request."""
    parts: dict[tuple[str, str], int] = {}
    for chunk in chunks:
        kind = "decode" if chunk.num_tokens == 1 and chunk.num_candidates and chunk.start else "prefill"
        parts[kind, chunk.request] = parts.get((kind, chunk.request), 0) + chunk.num_tokens
    for event in events:
        if event.get("cached_tokens"):
            parts["cached", event["request"]] = event["cached_tokens"]
    order = ("decode", "prefill", "cached")
    return sorted((Share(*key, count) for key, count in parts.items()), key=lambda s: order.index(s.kind))


def plan_svg(plan: Any, budget: int | None = None) -> Svg:
    """The picture of a `StepPlan` or a `StepRecord`.

    Args:
        plan: what to draw.
        budget: the most tokens a step computes; without it the bar ends with the tokens of the step.
    """
    chunks, events = _lines(plan)
    parts = shares(chunks, events)
    num_tokens = sum(part.num_tokens for part in parts if part.kind != "cached")
    total = max(budget or num_tokens, num_tokens)
    cached = sum(part.num_tokens for part in parts if part.kind == "cached")
    lines = [*_moves(plan), *map(_event, events)]
    picture = Picture(WIDTH, MARGIN + 26 + BAR + 34 + 20 * len(lines) + MARGIN)
    title = f"Step {plan.step}: {num_tokens} tokens" + (f" of a budget of {budget}" if budget else "")
    picture.text(MARGIN, MARGIN + 14, title, size=15, bold=True)
    _bar(picture, parts, total, total + cached)
    y = MARGIN + 26 + BAR + 22
    picture.text(MARGIN, y, _sums(parts, total - num_tokens if budget else 0), "soft", 12.5)
    for i, line in enumerate(lines):
        picture.text(MARGIN, y + 22 + 20 * i, line, "ink", 12.5)
    words = "; ".join(f"{p.kind} of request {p.request}: {p.num_tokens} tokens" for p in parts)
    return picture.render(title, ". ".join([words or "nothing to compute", *lines]) + ".")


def _bar(picture: Picture, parts: Sequence[Share], total: int, whole: int) -> None:
    requests = list(dict.fromkeys(part.request for part in parts))
    scale = (WIDTH - 2 * MARGIN) / max(1, whole)
    x, y = float(MARGIN), MARGIN + 26
    used = sum(part.num_tokens for part in parts if part.kind != "cached")
    for part in parts:
        if part.kind == "cached":
            continue
        _part(
            picture,
            part,
            x,
            y,
            part.num_tokens * scale,
            colour_of(part.request, requests.index(part.request)),
        )
        x += part.num_tokens * scale
    if total > used:
        width = (total - used) * scale
        picture.rect(x, y, width, BAR, "free")
        if width > 40:
            picture.text(x + width / 2, y + 21, "left", "soft", 12.5, "middle")
        x += width
    for part in parts:
        if part.kind == "cached":
            width = part.num_tokens * scale
            picture.rect(x, y, width, BAR, "shade")
            picture.hatch(x, y, width, BAR, 8)
            name = f"{part.request}: {part.num_tokens} cached"
            if text_width(name, 12) + 14 < width:
                middle, wide = x + width / 2, text_width(name, 12) + 10
                picture.rect(middle - wide / 2, y + 8, wide, 18, "paper", 8)
                picture.text(middle, y + 21, name, "ink", 12, "middle")
            x += width


def _part(picture: Picture, part: Share, x: float, y: float, width: float, colour: int) -> None:
    picture.rect(x, y, width, BAR, f"tint{colour}", 3)
    if part.kind == "decode":
        picture.line(x, y + BAR - 4, x + width, y + BAR - 4, f"edge{colour}", 4)
    short = f"{part.request}: {part.num_tokens}"
    for name in (f"{part.request}: {part.kind} {part.num_tokens}", short, part.request):
        if text_width(name, 12) + 8 < width:
            picture.text(x + width / 2, y + 20, name, "ink", 12, "middle")
            return


def _lines(plan: Any) -> tuple[Sequence[ChunkLine], Sequence[Mapping[str, Any]]]:
    """Chunks and events of a plan, or of a record, which has them as lines already."""
    chunks = [
        c if isinstance(c, ChunkLine) else ChunkLine(c.sequence.request.request_id, c.sequence.index, *c[1:])
        for c in plan.scheduled
    ]
    events = [
        e if isinstance(e, Mapping) else {"kind": e.kind, "request": e.request_id, **e.detail}
        for e in plan.events
    ]
    return chunks, events


def _sums(parts: Sequence[Share], left: int) -> str:
    sums: dict[str, int] = {}
    for part in parts:
        sums[part.kind] = sums.get(part.kind, 0) + part.num_tokens
    cached = sums.pop("cached", 0)
    told = [f"{kind} {count}" for kind, count in sums.items()] + ([f"left {left}"] if left else [])
    return ", ".join(told) + (f"; {cached} more were cached and cost nothing" if cached else "")


def _moves(plan: Any) -> list[str]:
    names = (
        ("swap_out", "swap out", "device", "host"),
        ("swap_in", "swap in", "host", "device"),
        ("copies", "copy on write", "block", "block"),
    )
    lines = []
    for field, name, source, destination in names:
        pairs = getattr(plan, field)
        if pairs:
            some = ", ".join(f"{source} {a} \u2192 {destination} {b}" for a, b in pairs[:4])
            lines.append(f"{name}: {some}" + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""))
    return lines


def _event(event: Mapping[str, Any]) -> str:
    """An event in a line: what happened to which request, how, and why."""
    text = f"request {event['request']} {event['kind']}" if "request" in event else str(event["kind"])
    if "mode" in event:
        text += f" ({event['mode']})"
    if "reason" in event:
        return f"{text}: {event['reason']}"
    if "prompt_tokens" in event:
        text += f": prompt of {event['prompt_tokens']} tokens"
        text += f", {event['cached_tokens']} cached" if event["cached_tokens"] else ""
        text += f", {event['blocks']} blocks"
    return text
