"""Keeps versions of models in a folder or in object storage, and the copies of a node (docs/registry.md)."""
