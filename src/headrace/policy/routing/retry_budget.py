"""Limits the requests that are sent again to the server that failed them to a share of all requests, so that failures cause no storm of
retries.

A token bucket without a clock. Every new request adds `share` of a token, every retry takes a whole one, and at most `burst` tokens are
kept. With everything failing, servers get at most 1 + `share` times the requests that clients send. Source: Finagle's RetryBudget.

Not here: trying another server, which a request does at most once per server.
"""

from __future__ import annotations


class RetryBudget:
    """The budget of one site or model. tokens: retries that it allows now"""

    def __init__(self, *, share: float = 0.2, burst: float = 10.0) -> None:
        """It begins full."""
        self._share = share
        self._burst = burst
        self.tokens = burst

    def deposit(self) -> None:
        """A new request came."""
        self.tokens = min(self.tokens + self._share, self._burst)

    def withdraw(self) -> bool:
        """Take one retry. False: none is left, and the failure stands."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def check(self) -> None:
        assert 0.0 <= self.tokens <= self._burst
