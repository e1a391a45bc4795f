"""Limits of tenants, users and keys at the gateway: what a request takes before it runs, and what it is charged (docs/limits.md)."""
