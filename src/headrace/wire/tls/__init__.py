"""Mutual TLS of the wire between machines: certificate files, the handshake, and why one failed. Why as it is: docs/wire.md.

`files` holds an end's certificates and reads them again when they change, `stream` speaks TLS over a socket, `faults` puts OpenSSL's
errors into words. They rest on the standard library alone. Certificates are made elsewhere (`fleet.authority`).
"""
