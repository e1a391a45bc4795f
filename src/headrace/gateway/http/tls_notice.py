"""The log line for operators about clients that speak https to a plain HTTP port, or what is no TLS to an https port."""

from __future__ import annotations

import logging
import math
import time

from headrace.core.clock import Clock

log = logging.getLogger(__name__)

TLS_HANDSHAKE = 0x16
"""First byte of a TLS handshake; HTTP begins with a letter."""

TLS_NOTICE_S = 60.0
"""Seconds between two log lines about TLS handshakes: a health check over https comes every second."""


SPOKE_HTTPS = "%s spoke https to this http port%s: use http://, let a proxy in front end TLS, or configure gateway.tls"
HANDSHAKE_FAILED = "a TLS handshake failed (%s)%s: http:// to this https port gives HTTP_REQUEST"


class TlsNotice:
    """Logs that a client spoke what this port does not, which sees no more than its connection close."""

    def __init__(self, clock: Clock = time.monotonic, *, text: str = SPOKE_HTTPS) -> None:
        """text: with places for what is known of the client, and for how many more there were"""
        self._text = text
        self._clock = clock
        self._due_at = -math.inf
        self._num_unsaid = 0

    def __call__(self, client: str) -> None:
        now = self._clock()
        if now < self._due_at:
            self._num_unsaid += 1
            return
        more = f" (so did {self._num_unsaid} connections before it)" if self._num_unsaid else ""
        log.warning(self._text, client, more)
        self._due_at, self._num_unsaid = now + TLS_NOTICE_S, 0
