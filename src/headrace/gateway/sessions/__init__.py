"""Conversations that the gateway keeps, and conversations made to fit their model's context. The rules stand in docs/sessions.md.

`history` is what is kept and chooses what stays, `sessions` where; `fitting` asks the model with what stays.
"""
