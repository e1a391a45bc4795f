"""Chooses a replica for a request."""
