"""Watch an engine and show its memory: in notebooks, in the terminal, in trace files, as pictures.

Import it in a notebook, and block tables, pools, plans and outputs are shown as pictures.
"""

from minipaged.viewer.displays import register_displays

register_displays()
