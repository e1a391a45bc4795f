"""Speaks HTTP: connections and their bounds, one request on bare ASGI, JSON, event streams, and errors as status and body."""
