"""Waiting sequences counted by tenant, for `max_waiting_per_tenant`: the part of the waiting queue that one tenant may fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.core.errors import Overloaded, RequestTooLarge
from headrace.core.ids import SeqId
from headrace.core.request import EngineRequest
from headrace.policy.schedule.sequence import Sequence


class WaitingTenants:
    """Sequences that do not run (new, blocked or preempted) by tenant. most: the bound per tenant; None: nothing is counted."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._waiting: dict[str, set[SeqId]] = {}

    def refuse_beyond(self, request: EngineRequest) -> None:
        """Raises Overloaded, RequestTooLarge when a request would take its tenant beyond its part."""
        most, n = self._most, request.params.n
        if most is None:
            return
        if n > most:
            raise RequestTooLarge("n", f"n <= max_waiting_per_tenant ({most})", n, "Send several requests.")
        waiting = len(self._waiting.get(request.tenant, ()))
        if waiting + n > most:
            raise Overloaded(
                f"this tenant's part of the waiting queue is full ({waiting} of max_waiting_per_tenant {most})", retry_after_s=1.0
            )

    def add(self, seq: Sequence) -> None:
        if self._most is not None:
            self._waiting.setdefault(seq.request.tenant, set()).add(seq.seq_id)

    def remove(self, seq: Sequence) -> None:
        """A sequence runs or ends. Removing it twice changes nothing."""
        waiting = self._waiting.get(seq.request.tenant)
        if waiting is None:
            return
        waiting.discard(seq.seq_id)
        if not waiting:
            del self._waiting[seq.request.tenant]

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless exactly the sequences of `waiting` are counted. Without a bound none is."""
        expected = Counter(seq.request.tenant for seq in waiting) if self._most is not None else Counter()
        assert {tenant: len(ids) for tenant, ids in self._waiting.items()} == expected, "a tenant's waiting sequences are miscounted"
