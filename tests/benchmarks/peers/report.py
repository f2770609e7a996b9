"""The page's table from the JSON files of `python -m tests.benchmarks.peers`.

    python -m tests.benchmarks.peers.report FILE.json ... [--same-settings FILE.json ...] -o PAGE.md

Where several files hold the same row, the last one counts. Ratios below 1 are named in words as well: a table
invites the eye to skip them.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.contest import OURS
from tests.benchmarks.peers.rows import ROWS

NAMES = {
    OURS: OURS,
    "vllm": "vLLM",
    "vllm-compiled": "vLLM, compiled",
    "padded": "transformers, padded `generate`",
    "continuous": "transformers, continuous batching",
    "openvino": "OpenVINO GenAI",
    "ort": "ONNX Runtime GenAI",
    "llama.cpp": "llama.cpp",
}


SETTINGS = "THP_MEM_ALLOC_ENABLE=1 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824"
"""What minipaged's command line sets for its own process (`minipaged/environment.py`), as variables."""


def page(results: list[dict[str, Any]], same_settings: list[dict[str, Any]]) -> str:
    """Markdown: chart, table, what is behind, how it was measured.

    Args:
        results: the runs.
        same_settings: runs in which every engine had the `SETTINGS`.
    """
    rows = _rows(results)
    lines = [
        "# Against other engines",
        "",
        "Throughput (tokens per second) of each engine relative to minipaged's (1.0), on the same requests.",
        "A shorter bar means a slower engine.",
        "",
        chart(rows),
        "",
        "| workload | engine | seconds | tokens/s | ratio | ITL p99, ms | KV slots | tokens equal |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    for row in rows:
        lines += [_line(row, engine) for engine in row["engines"]]
    lines += ["", *_behind(rows), "", *METHOD, "", *_runs(results)]
    if same_settings:
        lines += ["", *_same_settings(same_settings)]
    return "\n".join([*lines, ""])


METHOD = """## How it was measured

The models are randomly initialised Llamas, and all requests arrive at the start. Each engine is warmed up and
runs in its own process, and the engines take turns (A B C A B C). Not all workloads were measured on the same
machine, so compare within a workload.

- Seconds: median of the rounds; CPU seconds with one thread, wall-clock seconds with two.
- Tokens/s: output tokens divided by these seconds.
- Ratio: the engine's time divided by minipaged's in the same round (min / **median** / max); above 1,
  minipaged is faster.
- KV slots: tokens that fit in the blocks held at the peak; for a padded batch, the batch size times the sum
  of the longest prompt and the longest output.
- Tokens equal: in the first completion of each request. In greedy float32, all must be equal. Each engine
  quantises the weights in its own way: llama.cpp's format is Q8_0, OpenVINO's and ONNX Runtime's is what
  their converters call int8.
- 8-bit weights: OpenVINO keeps the activations in full precision, minipaged in 16 bits. llama.cpp and ONNX
  Runtime also quantise the activations to 8 bits. W8A8 (8-bit weights and activations): minipaged with
  `--quantization w8a8`, and OpenVINO with its default.

minipaged runs with the settings of its command line: large tensors in huge pages, freed memory kept. The
others run with their default memory settings ("vLLM" in eager mode, `enforce_eager=True`; "vLLM, compiled"
with its default, `torch.compile`). Ratios with the same memory settings for every engine are at the
end. Where several of these commands measured a workload, the table shows the last of them.""".splitlines()

ELSEWHERE = """On other machines, it is:

- [NVIDIA H200](gpu.md): cuDNN's attention is 1.6 to 2.1 times as fast in the prefill of whole prompts.
  Compared with our earlier tile sizes, it is up to 13 % faster in decode with contexts of 512 and 4,096
  tokens, and FlashAttention's decode up to 5 % faster with 16 sequences of 4,096 tokens.
- [Zen 3](single_stream.md#on-zen-3-with-avx2-only): single runs were slower than OpenVINO's (ratio 0.95) and
  ONNX Runtime's (0.89 and 0.93).""".splitlines()

BAR, ROW, LABEL, NUMBER, WIDTH = 13, 10, 200, 229, 350
"""In pixels on a phone: heights of a bar and of a gap below a row; where names, numbers and bars end."""


def chart(rows: list[dict[str, Any]]) -> str:
    """Bars as SVG: the speed of each engine, minipaged's being 1; colours and font are the page's.

    In two columns, which a phone shows one below the other.
    """
    heights = [BAR + 4 + (1 + len(row["peers"])) * (BAR + 2) + ROW for row in rows]
    tops = [sum(heights[:number]) for number in range(len(rows))]
    half = sum(top < sum(heights) / 2 for top in tops)
    columns = [column for column in (rows[:half], rows[half:]) if column]
    return (
        '<figure class="frame"><div class="sheet" tabindex="0" role="group" '
        'style="display: flex; flex-wrap: wrap; column-gap: 1rem">'
        f"{''.join(map(_column, columns))}</div></figure>"
    )


def _column(rows: list[dict[str, Any]]) -> str:
    parts, y, scale = [], 0, (WIDTH - NUMBER - 6) / 1.1
    for row in rows:
        title = f"{row['title']}, {row['dtype']}" + ", 2 threads" * (row["threads"] == 2)
        title = title.replace("caching on, ", "")  # so that it fits
        parts.append(f'<text x="0" y="{y + BAR - 2}" font-weight="600">{escape(title)}</text>')
        y += BAR + 4
        speeds = {engine: 1 / row["peers"][engine]["ratio"]["median"] for engine in row["peers"]}
        for engine, speed in {OURS: 1.0, **speeds}.items():
            shade = "" if engine == OURS else ' opacity="0.45"'
            parts += [
                f'<text x="{LABEL}" y="{y + BAR - 3}" text-anchor="end">{escape(NAMES[engine])}</text>',
                f'<text x="{NUMBER}" y="{y + BAR - 3}" text-anchor="end">{speed:.2f}</text>',
                f'<rect x="{NUMBER + 6}" y="{y}" width="{speed * scale:.1f}" height="{BAR - 2}"{shade}/>',
            ]
            y += BAR + 2
        y += ROW
    body = "".join(parts).replace("`", "")
    return (
        f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="Speed of each engine relative to minipaged" '
        'font-size="11" fill="currentColor" '
        f'style="min-width: 0; max-width: 25rem; flex: 1 1 15rem; align-self: start">{body}</svg>'
    )


def _rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = {row.name: number for number, row in enumerate(ROWS)}
    found = {row["row"]: row for run in results for row in run["rows"]}
    return sorted(found.values(), key=lambda row: order.get(row["row"], len(order)))


def _runs(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for run in results:
        versions: dict[str, str] = {}
        for row in run["rows"]:
            for engine, figures in row["engines"].items():
                own = figures["versions"]
                versions |= {name: number for name, number in own.items() if name != "torch"}
                if "torch" in own:
                    versions[f"torch ({NAMES[engine]})"] = own["torch"]
        torches = {number for name, number in versions.items() if name.startswith("torch")}
        if len(torches) == 1:
            versions = {name: number for name, number in versions.items() if not name.startswith("torch")}
            versions["torch"] = torches.pop()
        shown = ", ".join(f"{name} {number}" for name, number in versions.items())
        lines += [f"{run['date']}, {run['machine']}; {shown}:", "", "```bash", run["command"], "```", ""]
    return lines[:-1]


def _line(row: dict[str, Any], engine: str) -> str:
    figures = row["engines"][engine]
    seconds = figures[row["figure"]]["median"]
    where = f"{row['title']}, {row['dtype']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
    peer = row["peers"].get(engine, {})
    ratio = peer.get("ratio")
    cells = [
        where if engine == OURS else "",
        NAMES[engine],
        f"{seconds:.3g} {'CPU' if row['figure'] == 'cpu_s' else 'wall'}",
        f"{row['output_tokens'] / seconds:,.0f}",
        f"{ratio['min']:.2f} / **{ratio['median']:.2f}** / {ratio['max']:.2f}" if ratio else "",
        f"{figures['itl_ms_p99']['median']:,.0f}" if "itl_ms_p99" in figures else "",
        f"{figures['kv_slots']:,}" if "kv_slots" in figures else "",
        f"{peer['same_tokens']:,} of {peer['compared_tokens']:,}" if "same_tokens" in peer else "",
    ]
    return f"| {' | '.join(cells)} |"


def _behind(rows: list[dict[str, Any]]) -> list[str]:
    """Where a peer is faster or answers sooner."""
    lines = []
    for row in rows:
        ours = row["engines"][OURS]
        for name, peer in row["peers"].items():
            ratio = peer["ratio"]["median"]
            where = f"{row['title']} ({row['dtype']}, threads: {row['threads']})"
            if round(ratio, 2) < 1:
                lines.append(f"- {where}: {NAMES[name]} is {1 / ratio:.2f} times as fast.")
            theirs = row["engines"][name].get("itl_ms_p99")
            if theirs and round(ours["itl_ms_p99"]["median"]) > round(theirs["median"]):
                lines.append(
                    f"- {where}: the 99th percentile of the ITL is {ours['itl_ms_p99']['median']:.0f} ms, "
                    f"{theirs['median']:.0f} ms in {NAMES[name]}."
                )
    lines = lines or ["Nowhere in these rows."]
    return ["## Where minipaged is behind", "", *lines, "", *ELSEWHERE]


def _same_settings(results: list[dict[str, Any]]) -> list[str]:
    """The ratios of runs in which nobody had an advantage from the process's memory settings."""
    lines = ["## With the same memory settings", "", f"`{SETTINGS}` for every engine:", ""]
    lines += ["| workload | engine | ratio |", "|---|---|---|"]
    for row in _rows(results):
        where = f"{row['title']}, {row['dtype']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        for engine, peer in row["peers"].items():
            ratio = peer["ratio"]
            figures = f"{ratio['min']:.2f} / **{ratio['median']:.2f}** / {ratio['max']:.2f}"
            lines.append(f"| {where} | {NAMES[engine]} | {figures} |")
            where = ""
    return [*lines, "", *_runs(results)]


def main() -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="written by python -m tests.benchmarks.peers")
    parser.add_argument(
        "--same-settings", nargs="+", type=Path, default=[], help=f"the same, run with {SETTINGS}"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="the markdown file")
    arguments = parser.parse_args()
    results = [json.loads(file.read_text()) for file in arguments.files]
    same_settings = [json.loads(file.read_text()) for file in arguments.same_settings]
    arguments.out.write_text(page(results, same_settings))


if __name__ == "__main__":
    main()
