"""Answers one admitted request that generates, from its prompts to the last byte of its answer."""
