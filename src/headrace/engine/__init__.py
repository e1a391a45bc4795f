"""The engine: inbox, plan, submit, commit, outbox.

`loop` imports core and policy only; `runner` is where plans meet tensors; `server` is where the loop meets the wire.
"""
