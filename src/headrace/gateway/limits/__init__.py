"""Holds requests to the limits of tenants, users and keys: reserves before a request runs, and charges what it used (docs/limits.md)."""
