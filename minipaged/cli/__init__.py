"""The command line: options and printing only."""
