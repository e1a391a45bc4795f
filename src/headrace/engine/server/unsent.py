"""The outbox of one gateway in an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from headrace.core.load import LoadSnapshot
from headrace.core.update import SequenceUpdate
from headrace.engine.server.unread import UNIT_BYTES, UPDATE_UNITS, Unread, num_entries, num_units, put, take, units_alone
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_load, encode_rejected, encode_updates
from headrace.wire.service import Handle

MAX_UNITS = (32 << 20) // UNIT_BYTES
"""32 MiB that may be unsent to one gateway."""

REFUSAL_UNITS, REFUSAL_BYTES_PER_UNIT = 16, 16

FRAME_ENTRIES = 2**15
"""A frame is smaller than 1 MiB even when every entry is an alternative of a token."""

MAX_REJECTED_BYTES = 2**20
"""A larger refusal is the only one of its frame."""


class UnsentFrames:
    """Used on the server's event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Handle, int], Unread] = {}
        self._rejected: deque[tuple[pb.Rejected, int]] = deque()  # each with its bytes
        self._load: LoadSnapshot | None = None
        self._submits_seen = self._pings_seen = 0
        self._draining: str | None = None
        self._weights_digest = ""
        self._adapters: Mapping[str, str] | None = None
        self._num_row_units = 0
        self._num_refusal_units = 0

    @property
    def num_units(self) -> int:
        return self._num_row_units + self._num_refusal_units

    @property
    def is_empty(self) -> bool:
        has_facts = self._load is not None or self._draining is not None or self._weights_digest or self._adapters is not None
        return not (has_facts or self.has_answers)

    @property
    def has_answers(self) -> bool:
        return bool(self._waiting or self._rejected)

    def put(self, handle: Handle, update: SequenceUpdate) -> None:
        key = (handle, update.index)
        if key not in self._waiting and not update.prompt_logprobs:  # a gateway that keeps up
            self._waiting[key], units = update, units_alone(update)
        else:
            self._waiting[key], units = put(self._waiting.get(key), update)
        self._num_row_units += units

    def put_rejected(self, handle: Handle, error: Exception) -> None:
        rejected = encode_rejected(handle, error)
        num_bytes = rejected.ByteSize()
        self._rejected.append((rejected, num_bytes))
        self._num_refusal_units += _refusal_units(num_bytes)

    def put_load(self, load: LoadSnapshot, submits_seen: int, pings_seen: int = 0) -> None:
        self._load, self._submits_seen, self._pings_seen = load, submits_seen, pings_seen

    def put_draining(self, reason: str) -> None:
        self._draining = reason

    def put_weights_digest(self, digest: str) -> None:
        self._weights_digest = digest

    def put_adapters(self, adapters: Mapping[str, str]) -> None:
        """All of them: a list replaces one that waits."""
        self._adapters = adapters

    def forget(self, handle: Handle) -> None:
        for key in [key for key in self._waiting if key[0] == handle]:
            self._num_row_units -= num_units(self._waiting.pop(key))

    def take(self) -> pb.EngineFrame | None:
        if self.is_empty:
            return None
        frame = pb.EngineFrame(rejected=self._take_rejected())
        if self._waiting:
            frame.updates.CopyFrom(encode_updates(self._take_rows()))
        if self._load is not None:
            frame.load.CopyFrom(encode_load(self._load))
            frame.submits_seen, frame.pings_seen = self._submits_seen, self._pings_seen
            self._load = None
        if self._draining is not None:
            frame.draining.reason = self._draining
            self._draining = None
        frame.weights_digest, self._weights_digest = self._weights_digest, ""
        if self._adapters is not None:
            frame.adapters.SetInParent()
            frame.adapters.digests.update(self._adapters)
            self._adapters = None
        return frame

    def _take_rejected(self) -> list[pb.Rejected]:
        taken: list[pb.Rejected] = []
        num_bytes = 0
        while self._rejected:
            rejected, size = self._rejected[0]
            num_bytes += size
            if taken and num_bytes > MAX_REJECTED_BYTES:
                break
            self._rejected.popleft()
            self._num_refusal_units -= _refusal_units(size)
            taken.append(rejected)
        return taken

    def _take_rows(self) -> Iterator[tuple[Handle, SequenceUpdate]]:
        """A sequence whose update fits only in part goes to the end of the queue."""
        if self._num_row_units - UPDATE_UNITS * len(self._waiting) <= FRAME_ENTRIES:  # an entry is at least a unit: all of it fits
            waiting, self._waiting, self._num_row_units = self._waiting, {}, 0
            for (handle, _), unread in waiting.items():
                yield handle, unread if isinstance(unread, SequenceUpdate) else take(unread, FRAME_ENTRIES)[0]
            return
        remaining = FRAME_ENTRIES
        for key in list(self._waiting):
            if remaining <= 0:
                return
            unread = self._waiting.pop(key)
            self._num_row_units -= num_units(unread)
            update, left = take(unread, remaining)
            remaining -= num_entries(update)
            if left:
                self._waiting[key] = left
                self._num_row_units += num_units(left)
            yield key[0], update


def _refusal_units(num_bytes: int) -> int:
    return REFUSAL_UNITS + num_bytes // REFUSAL_BYTES_PER_UNIT
