"""Authenticates callers, counts open requests, and charges requests for the memory that they hold."""
