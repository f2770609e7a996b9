"""`python -m minipaged` is the `minipaged` command."""

from minipaged.cli import main

main()
