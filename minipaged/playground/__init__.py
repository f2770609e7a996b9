"""The real engine in a browser tab, by Pyodide: what the pages of docs/play call. The standard library alone."""
