"""A finished request as HTML: its texts, and which tokens lay in which block.

    +- 7 ------------------+ +- 1 shared -----------+ +- 3 ------+
    | Four score and seven | | years ago our fathers | | brought  |

Words wrap as the page is wide; the prompt is set lighter than what was generated. Draws a `RequestOutput`;
blocks only if `Highlights.place` said where they were.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from minipaged.viewer.highlights import Placement
from minipaged.viewer.pictures import palette
from minipaged.viewer.snapshot import TableView

if TYPE_CHECKING:
    from minipaged.outputs import CompletionOutput, RequestOutput

STYLE = (
    "figure.mp{margin:0;padding:14px 18px;border-radius:10px;background:var(--mp-paper);color:var(--mp-ink);"
    "font:14px/1.5 system-ui,sans-serif}"
    ".mp .head{font-weight:600;margin:0 0 8px}"
    ".mp .note{color:var(--mp-soft);font-size:12.5px;margin:4px 0 10px}"
    ".mp .row{display:flex;flex-wrap:wrap;gap:8px}"
    ".mp .kv{border:1.4px solid var(--mp-line);border-radius:6px;padding:1px 8px 4px}"
    ".mp .kv{background:var(--mp-shade)}"
    ".mp .kv b{font-size:11px;font-weight:600;display:block}"
    ".mp .kv code{background:none;color:inherit;font-size:12.5px;padding:0;white-space:pre-wrap}"
    ".mp .kv .prompt{opacity:.85;font-style:italic}"
) + "".join(
    f".mp .kv{i}{{background:var(--mp-tint{i});border-color:var(--mp-hue{i})}}"
    for i in range(len(palette.OWNERS))
)


def output_html(output: RequestOutput) -> str:
    """The figure of an output."""
    placement: Placement | None = output.placement
    uses: Counter[int] = Counter()
    if placement is not None:
        uses.update(block for table in placement.tables if table for block in table.blocks)
    parts = []
    for number, completion in enumerate(output.outputs):
        parts.append(f'<p class="head">{_head(output, completion, number)}</p>')
        table = placement.tables[number] if placement is not None else None
        if placement is not None and table is not None:
            parts.append(f'<div class="row">{_blocks(placement, table, uses, number)}</div>')
            parts.append(f'<p class="note">{_note(placement, table)}</p>')
        else:
            parts.append(f"<p>{escape((output.prompt or '') + completion.text)}</p>")
    count = len(output.prompt_token_ids)
    label = f"Request {output.request_id}: a prompt of {count} tokens and {len(output.outputs)} completions"
    style = f"<style>{palette.css()}{STYLE}</style>"
    return f'<figure class="mp" aria-label="{escape(label)}">{style}{"".join(parts)}</figure>'


def _head(output: RequestOutput, completion: CompletionOutput, number: int) -> str:
    name = f"Request {output.request_id}"
    if len(output.outputs) > 1:
        name += f", completion {number + 1}"
    generated = len(completion.token_ids)
    cached = f", {output.num_cached_tokens} cached" if output.num_cached_tokens else ""
    ended = completion.finish_reason or "still running"
    return escape(
        f"{name}: {len(output.prompt_token_ids)} prompt tokens{cached}, {generated} generated ({ended})"
    )


def _blocks(placement: Placement, table: TableView, uses: Counter[int], number: int) -> str:
    size, told = placement.block_size, []
    for logical, block in enumerate(table.blocks):
        tokens = table.tokens_of(logical, size)
        prompt = max(0, min(len(tokens), table.num_prompt - logical * size))
        texts = [
            placement.text_of(t).replace("\n", "\u23ce") if placement.text_of else f"{t} " for t in tokens
        ]
        shared = uses[block] > 1
        name = f"block {block}" + (f", \u00d7{uses[block]}" if shared else "")
        look = "kv" if shared else f"kv kv{number % len(palette.OWNERS)}"
        first, rest = escape("".join(texts[:prompt])), escape("".join(texts[prompt:]))
        told.append(
            f'<span class="{look}"><b>{name}</b><code><span class="prompt">{first}</span>{rest}</code></span>'
        )
    return "".join(told)


def _note(placement: Placement, table: TableView) -> str:
    slots = len(table.blocks) * placement.block_size
    return (
        f"{table.num_tokens} tokens in {len(table.blocks)} blocks of {placement.block_size}, "
        f"{slots - table.num_tokens} of {slots} slots empty; the last token was sampled and needs no slot"
    )
