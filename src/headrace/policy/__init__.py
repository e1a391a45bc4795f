"""Decides what the system does next: scheduling, KV blocks, queues, routing, limits. No torch, no sockets, no clock: `now` is an
argument.
"""
