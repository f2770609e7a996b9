"""How the objects of the core look in a notebook: displays registered by type."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any

from minipaged.memory import BlockTable, KVManager
from minipaged.outputs import RequestOutput
from minipaged.scheduling import StepPlan
from minipaged.viewer.highlights import PlacedOutput
from minipaged.viewer.pictures.output import output_html
from minipaged.viewer.pictures.plan import plan_svg
from minipaged.viewer.pictures.pool import manager_svg, pool_svg
from minipaged.viewer.pictures.tables import table_svg
from minipaged.viewer.recorder import StepRecord
from minipaged.viewer.replay import Trace
from minipaged.viewer.snapshot import PoolView


def trace_frame(trace: Trace) -> str:
    """The viewer in a frame that holds all of it and reaches nothing outside."""
    from minipaged.viewer.page import trace_page  # not on every import of minipaged

    properties = {
        "title": f"The run of {trace.path.name}",
        "sandbox": "allow-scripts allow-popups",
        "style": "width: 100%; height: 46rem; border: 0",
        "srcdoc": trace_page(trace.path),
    }
    written = " ".join(f'{name}="{html.escape(value)}"' for name, value in properties.items())
    return f"<iframe {written}></iframe>"


DISPLAYS: dict[type, Callable[[Any], str]] = {
    BlockTable: table_svg,
    KVManager: manager_svg,
    PlacedOutput: output_html,
    PoolView: pool_svg,
    RequestOutput: output_html,
    StepPlan: plan_svg,
    StepRecord: plan_svg,
    Trace: trace_frame,
}
"""Type -> its picture as HTML."""


def register_displays() -> None:
    """Register them, if this process runs in IPython."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython and ipython.get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        for kind, draw in DISPLAYS.items():
            formatter.for_type(kind, draw)
