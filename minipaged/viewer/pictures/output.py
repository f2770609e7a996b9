"""A finished request as HTML: its texts and, if `Highlights.place` has recorded them, its blocks.

Words wrap at the width of the page; the prompt is lighter than the output.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from minipaged.outputs import RequestOutput
from minipaged.text_io import counted
from minipaged.viewer.highlights import PlacedOutput
from minipaged.viewer.pictures import palette
from minipaged.viewer.snapshot import TableView

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


def output_html(shown: RequestOutput | PlacedOutput) -> str:
    """The figure of an output."""
    if isinstance(shown, RequestOutput):
        shown = PlacedOutput(shown, 1, (None,) * len(shown.outputs), None)
    output = shown.output
    uses = Counter(block for table in shown.tables if table for block in table.blocks)
    prompt = counted(len(output.prompt_token_ids), "prompt token")
    prompt += f", {output.num_cached_tokens} cached" if output.num_cached_tokens else ""
    parts = []
    for number, (completion, table) in enumerate(zip(output.outputs, shown.tables)):
        ended = completion.finish_reason or "still running"
        head = f"{shown.title(number)}: {prompt}, {len(completion.token_ids)} generated ({ended})"
        parts.append(f'<p class="head">{escape(head)}</p>')
        if table is None:
            parts.append(f"<p>{escape((output.prompt or '') + completion.text)}</p>")
            continue
        parts.append(f'<div class="row">{_blocks(shown, table, uses, number)}</div>')
        size = shown.block_size
        usage = table.usage(size).replace(",", f" of {size},", 1)
        parts.append(f'<p class="note">{usage}; the last token was sampled and needs no slot</p>')
    label = f"Request {output.request_id}: a prompt of {counted(len(output.prompt_token_ids), 'token')}"
    label += f" and {counted(len(output.outputs), 'completion')}"
    style = f"<style>{palette.css()}{STYLE}</style>"
    return f'<figure class="mp" aria-label="{escape(label)}">{style}{"".join(parts)}</figure>'


def _blocks(placed: PlacedOutput, table: TableView, uses: Counter[int], number: int) -> str:
    size, spans = placed.block_size, []
    for logical, block in enumerate(table.blocks):
        texts = table.texts_of(logical, size, placed.text_of)
        prompt = max(0, table.num_prompt - logical * size)
        shared = uses[block] > 1
        name = f"block {block}" + (f", \u00d7{uses[block]}" if shared else "")
        look = "kv" if shared else f"kv kv{number % len(palette.OWNERS)}"
        first, rest = escape("".join(texts[:prompt])), escape("".join(texts[prompt:]))
        spans.append(
            f'<span class="{look}"><b>{name}</b><code><span class="prompt">{first}</span>{rest}</code></span>'
        )
    return "".join(spans)
