"""Routing: the choice of a replica for a request."""
