"""The `headrace` commands. They may import every package; no package imports them."""
