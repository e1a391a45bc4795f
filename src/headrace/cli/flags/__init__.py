"""Flags of commands: which keys they set, what vLLM's become, and what help shows of them."""
