"""Quantized checkpoints: one module per format, each with a row in `table.FORMATS`."""
