"""Chooses a replica for a request, and a size of model."""
