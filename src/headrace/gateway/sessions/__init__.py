"""Conversations that the gateway keeps, and conversations made to fit their model's context. The rules stand in docs/sessions.md.

`history` is what is kept, `sessions` where, `turn` one request's part; `window` chooses what stays, `fitting` asks the model with it.
"""
