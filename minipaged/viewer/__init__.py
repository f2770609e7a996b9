"""Watch an engine and show its memory: in the terminal, in trace files, and as pictures (also in
notebooks)."""

from minipaged.viewer.displays import register_displays

register_displays()
