"""Connects served models to their upstreams, which answer requests: our engines over the wire, or foreign servers.

`seam` is the protocol of an upstream, and `served_models` has the models.
"""
