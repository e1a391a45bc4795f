"""Turns text into tokens and tokens into text: tokenizers, chat templates, incremental detokenizing, stop strings."""
