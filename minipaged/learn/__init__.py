"""Lessons, and classes of your own in place of the project's."""
