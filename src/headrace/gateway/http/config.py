"""The certificate of the HTTP door, as the configuration names it. What is made of it: `gateway.http.door_tls`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTls:
    """Paths of two PEM files.

    certificate  of this server, intermediate ones after it
    key          its private key: no passphrase, and closed to other users
    """

    certificate: str
    key: str
