"""Quantized checkpoints: one module per format, each with a row in `table.FORMATS`. Layers and models know nothing of formats."""
