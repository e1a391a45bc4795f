"""Connects gateways to engine processes over gRPC: the message format, its codec, the gateway's client, and what both ends agree on.

`headrace.proto` is the format. `codec` turns core values into messages and back. `client` is the gateway's end. The engine's end is
`engine.server` (one floor up), with its bounded queue of unsent updates. `leash` ties a process to its supervisor. docs/wire.md gives the
reasons.
"""
