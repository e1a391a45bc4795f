"""The wire between a gateway and an engine process: protos, generated messages, codec, client, and what both ends agree on.

`headrace.proto` is the format, `codec` turns core values into messages and back, `client` is the gateway's end, `engine.server` (one
floor up) is the engine's, with its bounded queue of what is not sent yet; `leash` ties a process to its supervisor. Why: docs/wire.md.
"""
