"""Paged attention for CPUs in C++, compiled on first use where a compiler is found; never required."""
