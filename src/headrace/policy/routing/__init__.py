"""Chooses a model of a route, and a replica for a request."""
