"""Requests that an answer needs before its own, such as the summary of an earlier conversation: reserved and charged with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.gateway.http.exchange import Exchange
from headrace.gateway.limits.admission import Admission
from headrace.gateway.upstream.output_events import NO_USAGE, added
from headrace.gateway.upstream.seam import EventStream, Prepared
from headrace.policy.limits.price import Price


class SideRequests:
    """The side requests of one request. usage: of all that have ended"""

    def __init__(self, admission: Admission, price: Price, exchange: Exchange) -> None:
        """price: of the model that is asked"""
        self._admission, self._price, self._exchange = admission, price, exchange
        self.usage = NO_USAGE

    @asynccontextmanager
    async def stream(self, prepared: Prepared) -> AsyncIterator[EventStream]:
        """The events of a side request. Raises what `Admission.reserve` raises."""
        await self._admission.reserve(self._price, prepared)
        stream = prepared.stream()
        self._admission.follow(stream.usage)
        try:
            yield stream
        finally:
            await stream.close()
            self._count(stream)

    def _count(self, stream: EventStream) -> None:
        """What no engine took costs nothing."""
        usage, record = stream.usage(), self._exchange.record
        if not usage.completion_tokens and self._exchange.end_reason is None:
            self._admission.count(None)
            return
        self._admission.count(usage)
        self.usage = added(self.usage, usage)
        record.prompt_tokens, record.completion_tokens, record.cached_tokens = self.usage[:3]
