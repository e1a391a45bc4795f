"""Connects the engine's loop to the wire.

`service` is the gRPC side: streams of gateways, routes of requests, heartbeats, drain. `unsent` holds the updates that one gateway has
not been sent yet. `process` puts an engine, its thread, the service and the supervisor's leash into one process. docs/wire.md has the why.
"""
