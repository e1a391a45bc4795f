"""Connects served models to their upstreams, which answer requests: our engines over the wire, or foreign servers."""
