"""Conversations that the gateway keeps, and conversations made to fit their model's context. The rules stand in docs/sessions.md.

`history` has the stored form and chooses the turns that stay, `sessions` reads and writes the store, `fitting` shortens or summarises.
"""
