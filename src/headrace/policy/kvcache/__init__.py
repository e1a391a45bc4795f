"""Keeps account of KV blocks: their owners, and which of them may be reused."""
