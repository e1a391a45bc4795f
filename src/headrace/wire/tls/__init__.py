"""Secures the wire between machines with mutual TLS: certificate files, the handshake, and the reason why one failed.

`files` loads an end's certificates, and `watched` loads them again when they change. `stream` speaks TLS over a socket. `faults` puts
OpenSSL's errors into words. All need the standard library alone. `fleet.authority` makes certificates. docs/wire.md says why TLS is done
this way.
"""
