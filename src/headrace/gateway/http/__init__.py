"""Bytes in, bytes out: connections and their bounds, one request on bare ASGI, JSON, event streams, errors to status and body."""
