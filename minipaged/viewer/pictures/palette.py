"""The colours of every picture and page: one palette, light and dark, safe for colour-blind readers.

Hues are those of Okabe and Ito (2008). Colour is never the only sign: owners and states also have names or
patterns.
"""

from __future__ import annotations

OWNERS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Hues of the first, second, ... request: blue, orange, green, purple, sky, vermilion; then again."""

Theme = dict[str, str]
"""Colours that differ between light and dark, as #rrggbb: paper (behind everything), ink (text), soft (less
important text), line (edges of what is nobody's), shade (a block without an owner), and of owner i: tint{i}
(fill of its blocks), hue{i} (edges and arrows)."""


def rgb(colour: str) -> tuple[int, int, int]:
    """The parts of #rrggbb, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(colour: str, other: str, share: float) -> str:
    """`share` of `other` in `colour`."""
    mixed = (round(a + (b - a) * share) for a, b in zip(rgb(colour), rgb(other)))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _theme(tint: float, hue: float, **theme: str) -> Theme:
    for i, colour in enumerate(OWNERS):
        theme |= {f"tint{i}": mix(colour, theme["paper"], tint), f"hue{i}": mix(colour, theme["ink"], hue)}
    return theme


LIGHT = _theme(0.68, 0.2, paper="#ffffff", ink="#1b2430", soft="#56616f", line="#8a94a1", shade="#eef1f4")
DARK = _theme(0.58, 0.12, paper="#151b23", ink="#e8edf3", soft="#a3afbd", line="#6d7a89", shade="#232c37")


def variables(theme: Theme) -> str:
    """The theme as CSS variables."""
    return "".join(f"--mp-{name}:{value};" for name, value in theme.items())


def _rule(selector: str, *properties: tuple[str, str]) -> str:
    """A rule whose colours follow the theme, and are the light ones where CSS variables are unsupported."""
    text = "".join(f"{key}:{LIGHT[name]};{key}:var(--mp-{name});" for key, name in properties)
    return f"{selector}{{{text}}}"


def css() -> str:
    """The style sheet of a picture: follows the reader's system, or the page's own switch."""
    dark_pages = '[data-md-color-scheme=slate] .mp,[data-jp-theme-light="false"] .mp,.vscode-dark .mp'
    light_pages = '[data-md-color-scheme=default] .mp,[data-jp-theme-light="true"] .mp,.vscode-light .mp'
    rules = [
        f".mp{{{variables(LIGHT)}}}",
        f"@media(prefers-color-scheme:dark){{.mp{{{variables(DARK)}}}}}",
        f"{dark_pages}{{{variables(DARK)}}}",
        f"{light_pages}{{{variables(LIGHT)}}}",
        ".mp text{font-family:system-ui,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif}",
        ".mp .mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
        _rule(".mp .paper", ("fill", "paper")),
        _rule(".mp .ink", ("fill", "ink")),
        _rule(".mp .soft", ("fill", "soft")),
        _rule(".mp .shade", ("fill", "shade"), ("stroke", "line")),
        _rule(".mp .free", ("fill", "paper"), ("stroke", "line")) + ".mp .free{stroke-dasharray:3 3}",
        _rule(".mp .gap", ("stroke", "paper")),
        _rule(".mp .rule", ("stroke", "line")) + ".mp .rule{fill:none}",
    ]
    for i in range(len(OWNERS)):
        rules += [
            _rule(f".mp .tint{i}", ("fill", f"tint{i}"), ("stroke", f"hue{i}")),
            _rule(f".mp .hue{i}", ("fill", f"hue{i}")),
            f".mp .pure{i}{{fill:{OWNERS[i]}}}",
            _rule(f".mp .edge{i}", ("stroke", f"hue{i}")) + f".mp .edge{i}{{fill:none}}",
        ]
    return "".join(rules)
