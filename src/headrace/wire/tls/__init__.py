"""Secures the wire between machines with mutual TLS (docs/wire.md says why this way)."""
