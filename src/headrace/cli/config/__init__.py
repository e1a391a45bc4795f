"""The configuration of `headrace serve`: its keys, and how it is read from file, environment and flags."""
