"""The core in reading order, with line counts, as README and architecture page show it.

python docs/_generate/reading_order.py        # rewrite both tables after the core has changed
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CORE = {
    "minipaged/memory/allocator.py": "which blocks are free; how many tables hold each of the rest",
    "minipaged/memory/block_table.py": "where each token is stored; `append`, `fork`, copy-on-write",
    "minipaged/memory/prefix_cache.py": "finding full blocks again by their content; LRU eviction",
    "minipaged/memory/kv_manager.py": "can these sequences have blocks? Admission, growth, swapping",
    "minipaged/scheduling/request.py": "a request and its sequences; what a decoding method returns",
    "minipaged/scheduling/plan.py": "the step plan: the only message from scheduler to executor",
    "minipaged/scheduling/policies.py": "prefill first or chunked prefill: the order of a step's phases",
    "minipaged/scheduling/scheduler.py": "admission, the phases of a step, preemption, commit, rollback",
    "minipaged/execution/batch.py": "the plan as flat tensors: token ids, positions, slots, block tables",
    "kernels/reference/attention.py": "attention that gathers keys and values through block tables",
    "minipaged/engine.py": "the loop around all of it: schedule, execute, commit",
}
"""File -> what it adds to those before it."""

PLACE = re.compile(r"(<!-- first sitting -->\n).*?(<!-- end of first sitting -->)", re.DOTALL)


def count_lines(file: str) -> int:
    """Lines of a file of the repository."""
    return len((ROOT / file).read_text().splitlines())


def table(links: bool) -> str:
    """The core as a table.

    Args:
        links: to the files; they work in the README, not on the site.
    """
    lines = ["| # | file | lines | what it adds |", "|---:|---|---:|---|"]
    for number, (file, adds) in enumerate(CORE.items(), start=1):
        name = f"`{file.removeprefix('minipaged/')}`"
        shown = f"[{name}]({file})" if links else name
        lines.append(f"| {number} | {shown} | {count_lines(file)} | {adds} |")
    lines.append(f"| | all eleven | {sum(map(count_lines, CORE)):,} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite both tables."""
    for page, links in ((ROOT / "README.md", True), (ROOT / "docs/architecture.md", False)):
        page.write_text(PLACE.sub(rf"\1\n{table(links)}\n\2", page.read_text()))


if __name__ == "__main__":
    main()
