"""Secures the wire between machines with mutual TLS: certificate files, the handshake, and the reason why one failed.

`files` holds an end's certificates and reads them again when they change. `stream` speaks TLS over a socket. `faults` puts OpenSSL's errors
into words. All three need the standard library alone. `fleet.authority` makes certificates. docs/wire.md says why TLS is done this way.
"""
