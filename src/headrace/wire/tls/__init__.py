"""Secures the wire between machines with mutual TLS: certificate files, the handshake, and the reason why one failed.

All need the standard library alone. `fleet.authority` makes certificates. docs/wire.md says why TLS is done this way.
"""
