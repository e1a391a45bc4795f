"""One sequence's updates that no frame has taken yet: merged while they wait, and charged by the memory they take.

An update of one token is a tuple of twelve fields, 230 bytes and more. A gateway that reads slowly would leave one per step, so a waiting
update takes in the plain ones that follow it: token ids go into an array, log-probabilities into columns. A unit is 32 bytes, and what is
charged is at least what is held. Bounds, frames and refusals are `unsent`'s.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from headrace.core.plan import TokenLogprobs, columns_of, wide_columns
from headrace.core.update import SequenceUpdate

UNIT_BYTES = 32

UPDATE_UNITS = 24
"""Charged for each update that waits on its own, beside its tokens: the tuple, its place in the queue, and the map's entry."""

COLUMNS_UNITS = 24
"""Charged for each update's log-probabilities, and again for those of its prompt, beside their entries: six arrays."""

MAX_MERGED_UNITS = 4096
"""An update that has grown to this many units takes no more in, since a frame is filled with whole updates."""

PAGE_POSITIONS = 1024
"""An update has at most this many prompt positions: a long prompt's log-probabilities travel in pages, with other sequences between."""

_NOTHING_ELSE = tuple(SequenceUpdate._field_defaults[name] for name in SequenceUpdate._fields[5:])
"""What an update has behind its tokens and their log-probabilities when it has nothing else."""


class UnreadUpdate:
    """One update, and the tokens of the plain ones that were merged into it.

    A single position's log-probabilities stay the object that they are: most updates wait for no other, and the object is quicker to send.
    """

    __slots__ = ("_token_ids", "_update", "num_units")

    def __init__(self, update: SequenceUpdate) -> None:
        num_units = UPDATE_UNITS + len(update.token_ids)
        if update.logprobs or update.prompt_logprobs:
            num_units += sum([COLUMNS_UNITS + _num_entries(columns) for columns in (update.logprobs, update.prompt_logprobs) if columns])
            if update.prompt_logprobs or len(update.logprobs) > 1:
                update = update._replace(logprobs=_columns(update.logprobs), prompt_logprobs=_columns(update.prompt_logprobs))
        self._update = update
        self._token_ids: array[int] | None = None
        self.num_units = num_units

    def takes(self, update: SequenceUpdate) -> bool:
        """Whether `update` may be merged: it has tokens and nothing else, and log-probabilities where this one has them."""
        is_plain = update[5:] == _NOTHING_ELSE and bool(update.logprobs) == bool(self._update.logprobs)
        return is_plain and self.num_units < MAX_MERGED_UNITS

    def merge(self, update: SequenceUpdate) -> None:
        if self._token_ids is None:
            self._token_ids = array("i", self._update.token_ids)
            self._update = self._update._replace(token_ids=(), logprobs=_columns(self._update.logprobs))
        self._token_ids.extend(update.token_ids)
        self.num_units += len(update.token_ids)
        if update.logprobs:
            columns = columns_of(self._update.logprobs)  # this one's own, made above
            for position in update.logprobs:
                columns.append(position)
            self.num_units += _num_entries(update.logprobs)

    def whole(self) -> SequenceUpdate:
        return self._update if self._token_ids is None else self._update._replace(token_ids=tuple(self._token_ids))


def put(waiting: list[UnreadUpdate], update: SequenceUpdate) -> int:
    """Add an update behind those of its sequence that wait. Returns the units that were added."""
    if waiting and waiting[-1].takes(update):
        before = waiting[-1].num_units
        waiting[-1].merge(update)
        return waiting[-1].num_units - before
    if len(update.prompt_logprobs) <= PAGE_POSITIONS:
        waiting.append(UnreadUpdate(update))
        return waiting[-1].num_units
    pages = [UnreadUpdate(page) for page in _pages(update)]
    waiting += pages
    return sum([page.num_units for page in pages])


def take(waiting: list[UnreadUpdate], max_units: int) -> tuple[SequenceUpdate, int]:
    """Remove the leading updates: all of them, or as many as first reach `max_units`. Returns them as one, and their units."""
    count = num_units = 0
    while count < len(waiting) and num_units < max_units:
        num_units += waiting[count].num_units
        count += 1
    taken = [unread.whole() for unread in waiting[:count]]
    del waiting[:count]
    return taken[0] if count == 1 else merge(taken), num_units


def merge(updates: list[SequenceUpdate]) -> SequenceUpdate:
    """Consecutive updates of one sequence as one. Raises ValueError for updates of different sequences."""
    first, last = updates[0], updates[-1]
    if any((update.request_id, update.epoch, update.index) != (first.request_id, first.epoch, first.index) for update in updates):
        raise ValueError("only updates of one sequence can be merged")
    cached = [update.num_cached_tokens for update in updates if update.num_cached_tokens is not None]
    queue_time = [update.queue_time_s for update in updates if update.queue_time_s is not None]
    return last._replace(
        token_ids=tuple([token_id for update in updates for token_id in update.token_ids]),
        logprobs=_columns(entry for update in updates for entry in update.logprobs),
        prompt_logprobs=_columns(entry for update in updates for entry in update.prompt_logprobs),
        num_cached_tokens=cached[0] if cached else None,
        queue_time_s=queue_time[0] if queue_time else None,
    )


def _columns(positions: Iterable[TokenLogprobs]) -> Sequence[TokenLogprobs]:
    """Columns that nothing else holds; of no positions, nothing."""
    columns = wide_columns()
    for position in positions:
        columns.append(position)
    return columns or ()


def _num_entries(positions: Sequence[TokenLogprobs]) -> int:
    return sum([1 + len(position.top_ids) for position in positions])


def _pages(update: SequenceUpdate) -> Iterator[SequenceUpdate]:
    """Prompt logprobs in pages; tokens and the end travel with the last one."""
    entries = update.prompt_logprobs
    while len(entries) > PAGE_POSITIONS:
        yield SequenceUpdate(request_id=update.request_id, epoch=update.epoch, index=update.index, prompt_logprobs=entries[:PAGE_POSITIONS])
        entries = entries[PAGE_POSITIONS:]
    yield update if entries is update.prompt_logprobs else update._replace(prompt_logprobs=entries)
