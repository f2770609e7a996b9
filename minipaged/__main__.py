"""`python -m minipaged` is the `minipaged` command."""

from minipaged.cli.main import main

main()
