"""Keeps conversations for clients, and makes conversations fit their model's context. docs/sessions.md has the rules."""
