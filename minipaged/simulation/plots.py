"""Figures from the JSON of an experiment, drawn like the sources' own: one row of panels, one SVG or PNG.

Readable on white paper and on a dark page: no background, grey text, a palette for colour-blind readers,
and a marker or hatch for every curve. The same JSON gives the same file, byte for byte. matplotlib (the
extra "plot") is imported only when something is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

GREY = "#767676"  # as far from white as from black
PALETTE = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#56B4E9")  # Okabe and Ito
MARKERS = "sv^Do*"
HATCHES = ("", "///", "...", "xx")


class PlotError(ValueError):
    """Figures cannot be drawn; the message says what to install."""


def save_figure(result: dict[str, Any], path: Path) -> None:
    """Draw the panels of an experiment (see `results.as_json`) to a file; its suffix says the format.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise PlotError("figures need matplotlib; install the extra: pip install 'minipaged[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.size": 9,
        "svg.hashsalt": "minipaged",
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"),
            GREY,
        ),
    }
    panels = result["panels"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(4.0 * columns + 0.4, 3.1 * rows), squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes.flat, panels):
            _draw(axis, panel)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, metadata=metadata, dpi=160)
        pyplot.close(figure)


def _draw(axis: Any, panel: dict[str, Any]) -> None:
    if panel["kind"] == "line":
        _lines(axis, panel)
    else:
        _bars(axis, panel)
    axis.set_title(panel["title"], fontsize=10)
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])
    if panel["y_limit"] is not None:
        axis.set_ylim(0, panel["y_limit"])
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 3}
    legend = axis.legend(fontsize=7.5, frameon=False, **({} if panel["kind"] == "line" else below))
    for text in legend.get_texts():
        text.set_color(GREY)


def _lines(axis: Any, panel: dict[str, Any]) -> None:
    for i, curve in enumerate(panel["curves"]):
        axis.plot(
            curve["x"],
            curve["y"],
            color=PALETTE[i % len(PALETTE)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            linewidth=1.4,
            linestyle="--" if curve["published"] else "-",
            label=curve["label"],
        )
    if panel["x_scale"] == "log2":
        axis.set_xscale("log", base=2)
        ticks = sorted({x for curve in panel["curves"] for x in curve["x"]})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
    if panel["y_scale"] == "log":
        axis.set_yscale("log")
    elif panel["y_limit"] is None:
        axis.set_ylim(bottom=0)


def _bars(axis: Any, panel: dict[str, Any]) -> None:
    curves = panel["curves"]
    names = list(dict.fromkeys(x for curve in curves for x in curve["x"]))
    stacked = panel["kind"] == "stacked"
    width = 0.7 if stacked else 0.8 / len(curves)
    bottom = dict.fromkeys(names, 0.0)
    for i, curve in enumerate(curves):
        shift = 0.0 if stacked else (i - (len(curves) - 1) / 2) * width
        published = curve["published"]
        bars = axis.bar(
            [names.index(x) + shift for x in curve["x"]],
            curve["y"],
            width * 0.94,
            bottom=[bottom[x] for x in curve["x"]],
            color="none" if published else PALETTE[(-1 - i) % len(PALETTE)],
            edgecolor=GREY,
            linestyle="--" if published else "-",
            hatch=HATCHES[i % len(HATCHES)] if stacked else "",
            label=curve["label"],
        )
        if not stacked:
            axis.bar_label(bars, fmt="%.3g", fontsize=7, color=GREY)
        for x, y in zip(curve["x"], curve["y"]):
            bottom[x] += y if stacked else 0.0
    axis.set_xticks(range(len(names)), names, fontsize=8 if len(names) < 5 else 7)
