"""Upstreams, which answer requests: their protocol (`seam`), our engines over the wire, foreign servers, and the served models."""
