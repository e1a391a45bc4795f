"""Holds one sequence's updates that no frame has taken yet. A single update is kept as it came; several are merged into arrays, since a
slow gateway's would pile up.

Memory is charged in units of 32 bytes, and the charge is at least what is held.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from headrace.core.plan import LogprobColumns, TokenLogprobs, wide_columns
from headrace.core.update import SequenceUpdate

UNIT_BYTES = 32

UPDATE_UNITS = 24
"""Charge for each waiting update beside its contents."""

POSITION_UNITS, ALTERNATIVE_UNITS = 8, 3
"""Charge for log-probabilities of a position, and for each alternative, that are still objects."""

COLUMNS_UNITS = 24
"""Charge for merged log-probabilities beside a unit per entry: six arrays."""

FACTS_UNITS = 12
"""Charge for an end, or a first token's facts."""

MAX_MERGED_ENTRIES = 4096

PAGE_POSITIONS = 1024


class UnreadUpdate:
    """num_entries: its size in a frame; num_units: its charge in memory"""

    __slots__ = ("_facts", "_logprobs", "_prompt_logprobs", "_token_ids", "num_entries", "num_units")

    def __init__(self, update: SequenceUpdate) -> None:
        self._facts = SequenceUpdate(update.request_id, update.epoch, update.index)  # all but tokens and log-probabilities
        self._token_ids = array("i")
        self._logprobs: LogprobColumns | None = None
        self._prompt_logprobs: LogprobColumns | None = None
        self.num_entries, self.num_units = 0, UPDATE_UNITS
        self.merge(update)

    def merge(self, update: SequenceUpdate) -> None:
        self._token_ids.extend(update.token_ids)
        added = len(update.token_ids)
        if update.logprobs:
            self._logprobs = self._columns(self._logprobs)
            added += _extend(self._logprobs, update.logprobs)
        if update.prompt_logprobs:
            self._prompt_logprobs = self._columns(self._prompt_logprobs)
            added += _extend(self._prompt_logprobs, update.prompt_logprobs)
        if _has_facts(update):
            added += _num_fact_units(update)
            self._keep_facts(update)
        self.num_entries += added
        self.num_units += added

    def _columns(self, columns: LogprobColumns | None) -> LogprobColumns:
        if columns is not None:
            return columns
        self.num_units += COLUMNS_UNITS
        return wide_columns()

    def _keep_facts(self, update: SequenceUpdate) -> None:
        first = self._facts
        self._facts = update._replace(
            token_ids=(),
            logprobs=(),
            prompt_logprobs=(),
            num_cached_tokens=update.num_cached_tokens if first.num_cached_tokens is None else first.num_cached_tokens,
            queue_time_s=update.queue_time_s if first.queue_time_s is None else first.queue_time_s,
            miss_reason=first.miss_reason or update.miss_reason,
        )

    def whole(self) -> SequenceUpdate:
        return self._facts._replace(
            token_ids=tuple(self._token_ids), logprobs=self._logprobs or (), prompt_logprobs=self._prompt_logprobs or ()
        )


Unread = SequenceUpdate | list[UnreadUpdate]


def put(unread: Unread | None, update: SequenceUpdate) -> tuple[Unread, int]:
    """Raises ValueError if the update belongs to another sequence."""
    if isinstance(unread, list):
        return unread, _merge(unread, update)
    if unread is None and len(update.prompt_logprobs) <= PAGE_POSITIONS:
        return update, units_alone(update)
    if unread is not None and update[:3] != unread[:3]:
        raise ValueError("only updates of one sequence can be merged")
    merged = [] if unread is None else [UnreadUpdate(unread)]
    added = 0 if unread is None else merged[0].num_units - units_alone(unread)
    return merged, added + _merge(merged, update)


def take(unread: Unread, max_entries: int) -> tuple[SequenceUpdate, list[UnreadUpdate]]:
    """(one update for a frame of at most about `max_entries`, the updates that stay)"""
    if not isinstance(unread, list):
        return unread, []
    count = num_entries = 0
    while count < len(unread) and num_entries < max_entries:
        num_entries += unread[count].num_entries
        count += 1
    first, *others = unread[:count]
    for other in others:
        first.merge(other.whole())
    return first.whole(), unread[count:]


def num_units(unread: Unread) -> int:
    return sum([update.num_units for update in unread]) if isinstance(unread, list) else units_alone(unread)


def units_alone(update: SequenceUpdate) -> int:
    units = UPDATE_UNITS + 2 * len(update.token_ids)
    if update.logprobs or update.prompt_logprobs:
        positions = [*update.logprobs, *update.prompt_logprobs]
        units += POSITION_UNITS * len(positions) + ALTERNATIVE_UNITS * sum([len(position.top_ids) for position in positions])
    if update.finish is None and update.num_cached_tokens is None and update.queue_time_s is None:  # no call: most updates, once per token
        return units
    return units + _num_fact_units(update)


def num_entries(update: SequenceUpdate) -> int:
    num_logprobs = sum([_num_entries(positions) for positions in (update.logprobs, update.prompt_logprobs) if positions])
    return len(update.token_ids) + num_logprobs + (_num_fact_units(update) if _has_facts(update) else 0)


def _merge(unread: list[UnreadUpdate], update: SequenceUpdate) -> int:
    if len(update.prompt_logprobs) > PAGE_POSITIONS:
        return sum([_merge(unread, page) for page in _pages(update)])
    if not unread or unread[-1].num_entries >= MAX_MERGED_ENTRIES:
        unread.append(UnreadUpdate(update))
        return unread[-1].num_units
    last = unread[-1]
    before = last.num_units
    last.merge(update)
    return last.num_units - before


def _has_facts(update: SequenceUpdate) -> bool:
    return update.finish is not None or update.num_cached_tokens is not None or update.queue_time_s is not None


def _num_fact_units(update: SequenceUpdate) -> int:
    return FACTS_UNITS + (0 if update.error is None else 1 + sys.getsizeof(update.error) // UNIT_BYTES)


def _extend(columns: LogprobColumns, positions: Sequence[TokenLogprobs]) -> int:
    before = len(columns.token_ids) + len(columns.top_ids)
    if isinstance(positions, LogprobColumns) and positions.logprobs.typecode == "d":
        columns.extend(positions)
    else:
        for position in positions:
            columns.append(position)
    return len(columns.token_ids) + len(columns.top_ids) - before


def _num_entries(positions: Sequence[TokenLogprobs]) -> int:
    if isinstance(positions, LogprobColumns):
        return len(positions) + len(positions.top_ids)
    return len(positions) + sum([len(position.top_ids) for position in positions])


def _pages(update: SequenceUpdate) -> Iterator[SequenceUpdate]:
    entries = update.prompt_logprobs
    while len(entries) > PAGE_POSITIONS:
        yield SequenceUpdate(request_id=update.request_id, epoch=update.epoch, index=update.index, prompt_logprobs=entries[:PAGE_POSITIONS])
        entries = entries[PAGE_POSITIONS:]
    yield update if entries is update.prompt_logprobs else update._replace(prompt_logprobs=entries)
