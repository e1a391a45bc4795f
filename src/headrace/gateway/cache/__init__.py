"""Keeps whole answers that are given again: the response cache, and retries with an Idempotency-Key. docs/caches.md has the rules."""
