"""Keeps conversations for clients, and makes conversations fit their model's context. docs/sessions.md has the rules.

`history` has the stored form and chooses the turns that stay. `sessions` reads and writes the store. `fitting` shortens or summarises.
"""
