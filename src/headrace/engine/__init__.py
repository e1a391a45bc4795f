"""Runs a model's engine: takes requests from an inbox, plans steps, has a runner compute them, and emits updates.

`loop` imports core and policy only. Plans meet tensors in `runner`; the loop meets the wire in `server`.
"""
