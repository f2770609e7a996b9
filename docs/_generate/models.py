"""Write the table of docs/models.md: every causal model type of the installed transformers, run or refused.

    python docs/_generate/models.py

Takes minutes, so the table is committed; `tests/models/test_survey.py` checks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import transformers

from tests.models.survey import CAUSAL_TYPES, IMAGE_TEXT_TYPES, Verdict, judge

PAGE = Path(__file__).parent.parent / "models.md"
MARK = "<!-- written by docs/_generate/models.py from here on -->\n"


def row(model_type: str, verdict: Verdict) -> str:
    """A line of the table."""
    labels = {"runs": "runs", "refused": "refused: ", "not built": "not tried", "differs": "differs: "}
    reason = "" if verdict.outcome == "not built" else verdict.reason
    return f"| `{model_type}` | {labels[verdict.outcome]}{reason} |\n"


def table(verdicts: dict[str, Verdict]) -> str:
    """Counts, and a line per type."""
    outcomes = [verdict.outcome for verdict in verdicts.values()]
    runs, refused, not_built = map(outcomes.count, ("runs", "refused", "not built"))
    return (
        f"\nWith transformers {transformers.__version__}, {runs} of {len(outcomes)} types run, {refused} are "
        f"refused, and {not_built} were not tried, because no small version could be built.\n\n"
        "| model type | verdict |\n|---|---|\n"
        + "".join(row(name, verdict) for name, verdict in verdicts.items())
    )


def main() -> None:
    """Judge every type and write the table."""
    transformers.logging.set_verbosity_error()
    verdicts = {}
    for name in sorted({*CAUSAL_TYPES, *IMAGE_TEXT_TYPES}):
        verdicts[name] = judge(name)
        print(name, *verdicts[name], flush=True)
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + table(verdicts))


if __name__ == "__main__":
    main()
