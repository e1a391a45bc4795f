"""Parses generated text into content, reasoning and tool calls, by the format of a model's family (docs/structured.md)."""
