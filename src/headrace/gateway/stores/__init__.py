"""Stores data that outlives a request: one protocol (`store`), an embedded implementation and one for several machines."""
