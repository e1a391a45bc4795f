"""Holds the `headrace` commands, which may import every package and which no package imports."""
