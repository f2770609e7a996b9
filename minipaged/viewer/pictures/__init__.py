"""Pictures of the memory, as SVG and HTML."""
