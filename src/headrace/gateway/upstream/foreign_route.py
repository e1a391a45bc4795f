"""Which server of a model gets a request, and what follows a failed attempt. Decisions only: nothing is sent from here.

A request goes to a server that takes it (circuit closed or due for its probe, no rate limit in force, room for one more) and was not tried,
preferring one that fits and can be reached, then the lowest `order`, then the less loaded of two random ones. Each server is tried once
before one is tried again, and that only where its failure may pass: no connection, a 5xx, a 429 whose Retry-After is short.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, Overloaded, Unavailable
from headrace.gateway.upstream.foreign_server import BUSY, NOT_NOW, AttemptFailed, AttemptResult, ForeignServer
from headrace.policy.routing.choice import Random, cheaper_of_two
from headrace.policy.routing.retry_budget import RetryBudget

MAX_ATTEMPTS = 3
"""Attempts of one request, or as many as the model has servers where these are more."""

BACKOFF_S = 0.1
"""Least seconds before a server is tried again; they double with every attempt, and up to a quarter is added at random."""

MAX_RETRY_WAIT_S = 2.0
"""Most seconds that a request waits for a server. Beyond them the client is asked to wait instead, by Retry-After."""

CAN_PASS = (AttemptResult.CONNECT, AttemptResult.SERVER_ERROR, AttemptResult.RATE_LIMITED)
"""Failures after which the same server is tried again."""


class ForeignRoute:
    """The attempts of one request. tried: servers and how their last attempt ended"""

    def __init__(
        self, servers: Sequence[ForeignServer], *, max_tokens: int | None, budget: RetryBudget, clock: Clock, random: Random
    ) -> None:
        """max_tokens: of one sequence, None where not given"""
        self.tried: dict[ForeignServer, AttemptResult] = {}
        self._servers = list(servers)
        self._max_tokens = max_tokens
        self._budget = budget
        self._clock = clock
        self._random = random
        self._num_attempts = 0
        budget.deposit()

    def pick(self) -> ForeignServer:
        """The server for the next attempt. Raises Overloaded or Unavailable where none takes the request now."""
        now = self._clock()
        able = [server for server in self._servers if server.can_take(now)]
        left = [server for server in able if server not in self.tried]
        left = left or [server for server in able if self.tried[server] in CAN_PASS]
        if not left:
            raise self._refusal(now)
        if len(left) == 1:
            return left[0]
        fit = [server for server in left if self._fits(server)] or left
        reachable = [server for server in fit if server.is_reachable] or fit
        order = min(server.config.order for server in reachable)
        first = [server for server in reachable if server.config.order == order]
        return cheaper_of_two(first, lambda server: server.outstanding(now), self._random)

    def pause_s(self, server: ForeignServer, failure: AttemptFailed) -> float:
        """Seconds before the next attempt, after one that failed. Raises the failure's error where no other follows."""
        self.tried[server] = failure.result
        self._num_attempts += 1
        if failure.result is AttemptResult.OVERFLOW:
            self._servers = [each for each in self._servers if (each.max_model_len or 0) > (server.max_model_len or 0)]
        is_final = failure.has_begun or failure.result is AttemptResult.INVALID or not self._servers
        if is_final or self._num_attempts >= max(MAX_ATTEMPTS, len(self._servers)):
            raise failure.error
        now = self._clock()
        if any(each.can_take(now) and each not in self.tried for each in self._servers):
            return 0.0
        waits = [each.wait_s(now) for each in self._servers if each.has_room and self.tried.get(each) in CAN_PASS]
        pause_s = max(min(waits, default=0.0), BACKOFF_S * 2.0 ** (self._num_attempts - 1))
        if not waits or pause_s > MAX_RETRY_WAIT_S or not self._budget.withdraw():
            raise failure.error
        return pause_s * (1.0 + self._random.randrange(256) / 1024)

    def _fits(self, server: ForeignServer) -> bool:
        """Whether an output of `max_tokens` fits behind a prompt of at least one token, as far as known."""
        return server.max_model_len is None or (self._max_tokens or 0) < server.max_model_len

    def _refusal(self, now: float) -> HeadraceError:
        wait_s = max(1.0, min(server.wait_s(now) for server in self._servers))
        if not all(server.is_out for server in self._servers):
            return Overloaded(BUSY, retry_after_s=wait_s)
        return Unavailable(NOT_NOW, retry_after_s=wait_s)
