"""What one step does: how its token budget is spent, and which blocks move.

A single token after the prompt that samples is a decode, unless its request is admitted in this step;
anything else is a prefill (or a recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from minipaged.scheduling import StepPlan
from minipaged.text_io import counted
from minipaged.viewer.delta import ScheduledTokens
from minipaged.viewer.pictures.names import colour_of
from minipaged.viewer.pictures.svg import MARGIN, Picture, Svg, below_caption, in_both_forms, text_width
from minipaged.viewer.recorder import StepRecord, admitted, event_fields, scheduled_tokens

BAR, WIDTH, WIDTH_ON_A_PHONE = 34, 720, 404
KINDS = ("decode", "prefill", "cached")


class Share(NamedTuple):
    """A part of the step's tokens; the kind is "decode", "prefill" or "cached"."""

    kind: str
    request: str
    num_tokens: int


def shares(plan: StepPlan | StepRecord) -> list[Share]:
    """Decodes first, then prefills, then what the prefix cache made unnecessary; one part a request."""
    scheduled, events = _decisions(plan)
    if isinstance(plan, StepRecord):
        prompts = [plan.planned.tables[tokens.name].num_prompt for tokens in scheduled]
    else:
        prompts = [item.sequence.num_prompt_tokens for item in plan.scheduled]
    anew = admitted(events)
    parts: Counter[tuple[str, str]] = Counter()
    for tokens, num_prompt in zip(scheduled, prompts):
        is_single = tokens.num_tokens == 1 and tokens.num_candidates
        is_decode = is_single and tokens.start >= num_prompt and tokens.request not in anew
        parts["decode" if is_decode else "prefill", tokens.request] += tokens.num_tokens
    for event in events:
        if event.get("cached_tokens"):
            parts["cached", event["request"]] = event["cached_tokens"]
    return sorted((Share(*key, count) for key, count in parts.items()), key=lambda s: KINDS.index(s.kind))


def plan_svg(plan: StepPlan | StepRecord, budget: int | None = None) -> Svg:
    """The picture of a plan or of a record; without a budget the bar ends with the tokens of the step."""
    lines = [*_moves(plan), *map(_event, _decisions(plan)[1])]
    parts = shares(plan)
    return in_both_forms(lambda narrow: _draw(plan.step, parts, budget, lines, narrow))


def _decisions(plan: StepPlan | StepRecord) -> tuple[Sequence[ScheduledTokens], Sequence[Mapping[str, Any]]]:
    if isinstance(plan, StepRecord):
        return plan.scheduled, plan.events
    return scheduled_tokens(plan), tuple(map(event_fields, plan.events))


def _draw(step: int, parts: Sequence[Share], budget: int | None, lines: Sequence[str], narrow: bool) -> Svg:
    sums = {kind: sum(part.num_tokens for part in parts if part.kind == kind) for kind in KINDS}
    num_tokens = sums["decode"] + sums["prefill"]
    left = max(0, (budget or 0) - num_tokens)
    title = f"Step {step}: {counted(num_tokens, 'token')}{f' of a budget of {budget}' if budget else ''}"
    counts = [f"{kind} {sums[kind]}" for kind in KINDS[:2] if sums[kind]] + [f"left {left}"] * bool(left)
    cached = f"; {sums['cached']} more were cached and cost nothing" if sums["cached"] else ""
    width = WIDTH_ON_A_PHONE if narrow else WIDTH
    room = int((width - 2 * MARGIN) / text_width("x", 12.5))
    below = [(line, "soft") for line in wrap(", ".join(counts) + cached, room)]
    below += [(part, "ink") for line in lines for part in wrap(line, room)]
    top = below_caption(title, width)
    picture = Picture(width, top + BAR + 14 + 20 * len(below) + MARGIN, title)
    _bar(picture, parts, left, top)
    for i, (line, look) in enumerate(below):
        picture.text(MARGIN, top + BAR + 22 + 20 * i + 2 * (i > 0), line, look, 12.5)
    words = "; ".join(f"{p.kind} of request {p.request}: {counted(p.num_tokens, 'token')}" for p in parts)
    return picture.render(title, ". ".join([words or "nothing to compute", *lines]) + ".")


def _bar(picture: Picture, parts: Sequence[Share], left: int, y: float) -> None:
    requests = list(dict.fromkeys(part.request for part in parts))
    scale = (picture.width - 2 * MARGIN) / max(1, left + sum(part.num_tokens for part in parts))
    x = float(MARGIN)
    spare = [Share("left", "", left)] * bool(left)
    for part in sorted([*parts, *spare], key=lambda part: part.kind == "cached"):
        width = part.num_tokens * scale
        middle, name = x + width / 2, f"{part.request}: {part.num_tokens}"
        if part.kind == "left":
            picture.block(x, y, width, BAR, "free")
            if width > 40:
                picture.text(middle, y + 21, "left", "soft", 12.5, "middle")
        elif part.kind == "cached":
            picture.block(x, y, width, BAR, "evictable", gap=8)
            wide = text_width(f"{name} cached", 12) + 10
            if wide + 4 < width:
                picture.rect(middle - wide / 2, y + 8, wide, 18, "paper", 8)
                picture.text(middle, y + 21, f"{name} cached", "ink", 12, "middle")
        else:
            colour = colour_of(part.request, requests.index(part.request))
            picture.rect(x, y, width, BAR, f"tint{colour}", 3)
            if part.kind == "decode":
                picture.line(x, y + BAR - 4, x + width, y + BAR - 4, f"edge{colour}", 4)
            names = (f"{part.request}: {part.kind} {part.num_tokens}", name, part.request)
            if fitting := next((text for text in names if text_width(text, 12) + 8 < width), ""):
                picture.text(middle, y + 20, fitting, "ink", 12, "middle")
        x += width


def _moves(plan: StepPlan | StepRecord) -> list[str]:
    names = (
        (plan.swap_out, "swap out", "device", "host"),
        (plan.swap_in, "swap in", "host", "device"),
        (plan.copies, "copy on write", "block", "block"),
    )
    lines = []
    for pairs, name, source, destination in names:
        if pairs:
            some = ", ".join(f"{source} {a} \u2192 {destination} {b}" for a, b in pairs[:4])
            lines.append(f"{name}: {some}" + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""))
    return lines


def _event(event: Mapping[str, Any]) -> str:
    text = f"request {event['request']} {event['kind']}" if "request" in event else str(event["kind"])
    if "mode" in event:
        text += f" ({event['mode']})"
    if "reason" in event:
        return f"{text}: {event['reason']}"
    if "prompt_tokens" in event:
        cached = f", {event['cached_tokens']} cached" if event["cached_tokens"] else ""
        tokens, blocks = counted(event["prompt_tokens"], "token"), counted(event["blocks"], "block")
        text += f": prompt of {tokens}{cached}, {blocks}"
    return text
