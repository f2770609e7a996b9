"""Figures from the JSON of an experiment, drawn like those in the sources: panels, one legend, one SVG or
PNG.

Readable on white paper and on a dark page: no background, grey text, a palette for colour-blind readers,
and a marker or hatch for every curve. A label looks the same in all panels, and a system in all figures. The
same JSON gives the same file, byte for byte. matplotlib (the extra "plot") is imported only when something is
drawn.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

GREY = "#767676"  # as far from white as from black
PALETTE = ("#D55E00", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#56B4E9")  # Okabe and Ito
MARKERS = "sv^Do*"
HATCHES = ("", "///", "...", "xx")
SYSTEMS = ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged")
CHARACTERS = 14.5  # of the legend, in an inch
STYLE: Any = {
    "font.size": 9,
    "legend.fontsize": 8.5,
    "axes.titlesize": 10,
    "svg.hashsalt": "minipaged",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"), GREY
    ),
}


class PlotError(ValueError):
    """Figures cannot be drawn; the message says what to install."""


def check_figures(folder: Path, make: bool = False) -> None:
    """`PlotError`, before minutes of simulation, if figures cannot be drawn or written to this folder."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"cannot write to {folder}: {error.strerror}"
        raise PlotError(f"{why}; give a writable folder") from None
    _need_matplotlib()


def save_figure(result: dict[str, Any], path: Path) -> None:
    """Draw the panels of an experiment (see `results.as_json`) to a file; its suffix sets the format."""
    figure = draw(result)
    import matplotlib

    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, transparent=True, metadata=metadata, dpi=160)


def save_figures(results: Sequence[dict[str, Any]], folder: Path, suffix: str) -> None:
    """Draw each experiment to a file with its name in the folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        save_figure(result, folder / f"{result['experiment']}.{suffix}")


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(
            'figures need matplotlib; in your clone, run pip install -c constraints.txt -e ".[plot]"'
        ) from None


def draw(result: dict[str, Any]) -> Any:
    """The same as a matplotlib `Figure`; `PlotError` where matplotlib is not installed."""
    _need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = result["panels"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = (0, 4.6, 7.2, 9.6)[columns]
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(width, 2.7 * rows + 0.4), layout=layout)
        looks = _looks(curve["label"] for panel in panels for curve in panel["curves"])
        for number, panel in enumerate(panels, start=1):
            _panel(figure.add_subplot(rows, columns, number), panel, looks)
        _legend(figure, width)
    return figure


def _looks(labels: Iterable[str]) -> dict[str, int]:
    """Label -> the number of its colour, marker and hatch: a system's own; beside systems, the last ones."""
    names = list(dict.fromkeys(labels))
    systems = {name: SYSTEMS.index(name) for name in names if name in SYSTEMS}
    others = [name for name in names if name not in systems]
    free = [i for i in reversed(range(len(PALETTE))) if i not in systems.values()]
    return systems | dict(zip(others, cycle(free) if systems else range(len(others))))


def _legend(figure: Any, width: float) -> None:
    """One for all panels, below them: in as few rows as fit, the rows equally long."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    across = max(1, int(width * CHARACTERS / (max(map(len, handles)) + 9)))
    rows = -(-len(handles) // across)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=-(-len(handles) // rows), frameon=False
    )


def _panel(axis: Any, panel: dict[str, Any], looks: dict[str, int]) -> None:
    (_lines if panel["kind"] == "line" else _bars)(axis, panel, looks)
    axis.set_title(panel["title"])
    axis.set_xlabel(panel["x_label"])
    axis.set_ylabel(panel["y_label"])
    if panel["y_limit"] is not None:
        axis.set_ylim(0, panel["y_limit"])
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _lines(axis: Any, panel: dict[str, Any], looks: dict[str, int]) -> None:
    for curve in panel["curves"]:
        i = looks[curve["label"]]
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
        from matplotlib.ticker import LogLocator, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif panel["y_limit"] is None:
        axis.set_ylim(bottom=0)


def _bars(axis: Any, panel: dict[str, Any], looks: dict[str, int]) -> None:
    curves = panel["curves"]
    names = list(dict.fromkeys(x for curve in curves for x in curve["x"]))
    stacked = panel["kind"] == "stacked"
    width = 0.7 if stacked else 0.8 / len(curves)
    bottom = dict.fromkeys(names, 0.0)
    for place, curve in enumerate(curves):
        i = looks[curve["label"]]
        shift = 0.0 if stacked else (place - (len(curves) - 1) / 2) * width
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
            axis.bar_label(bars, fmt="%.3g", fontsize=8, color=GREY)
        for x, y in zip(curve["x"], curve["y"]):
            bottom[x] += y if stacked else 0.0
    axis.set_xticks(range(len(names)), [str(name).replace(" (", "\n(") for name in names], fontsize=8.5)
