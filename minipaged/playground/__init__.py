"""The real engine in a browser tab, run by Pyodide for the pages of docs/play. Standard library only."""
