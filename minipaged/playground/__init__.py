"""The real engine in a browser tab, by Pyodide: what the pages of docs/play call. Standard library alone."""
