"""Replicas on the nodes of a Ray cluster (docs/ray.md)."""
