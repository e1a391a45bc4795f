"""Measures what many hostile or heavy requests at once, or faults under load, do to a server, its memory and its other clients: storms."""
