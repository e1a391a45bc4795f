"""LoRA adapters of one engine: their names, their weights on the host, and the requests that wait for them (docs/adapters.md)."""
