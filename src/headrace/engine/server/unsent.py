"""What one gateway has not been sent yet: bounded, and coalesced while the gateway is slow.

A gateway that keeps up is sent one frame per step. While a frame is still being written, the next steps' updates of a sequence are
merged, so that a slow gateway costs memory per token but frames per write. Beyond MAX_UNITS the gateway loses its lease; that is the
service's decision, this module only counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from headrace.core.load import LoadSnapshot
from headrace.core.plan import TokenLogprobs
from headrace.core.update import SequenceUpdate
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_load, encode_rejected, encode_updates
from headrace.wire.handles import Handle

MAX_UNITS = 2**20
"""Tokens plus logprob entries one gateway may leave unread, and refusals by what they hold."""

REFUSAL_UNITS, REFUSAL_BYTES_PER_UNIT = 16, 16
"""Of each refusal, and for its bytes: 0.5 KiB of memory for the shortest, about twice its bytes for a long one, and a unit is 32 bytes."""

FRAME_UNITS = 2**15
"""Of one frame: below a mebibyte even when every unit is a logprob entry."""

MAX_REJECTED_BYTES = 2**20
"""Of one frame's refusals; one larger refusal travels alone."""

PAGE_POSITIONS = 1024
"""Prompt positions per update: prompt logprobs travel in pages, so that other sequences' tokens get between them."""


class UnsentFrames:
    """Not thread-safe: lives on the server's asyncio loop."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Handle, int], list[SequenceUpdate]] = {}
        self._rejected: deque[tuple[pb.Rejected, int]] = deque()  # each with its bytes
        self._load: LoadSnapshot | None = None
        self._submits_seen = 0
        self._draining: str | None = None
        self._weights_digest = ""
        self._num_row_units = 0
        self._num_refusal_units = 0

    @property
    def num_units(self) -> int:
        """All that waits, held against MAX_UNITS."""
        return self._num_row_units + self._num_refusal_units

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._rejected and self._load is None and self._draining is None and not self._weights_digest

    @property
    def has_answers(self) -> bool:
        """Something a request waits for, not only a load snapshot."""
        return bool(self._waiting or self._rejected)

    def put(self, handle: Handle, update: SequenceUpdate) -> None:
        parts = self._waiting.setdefault((handle, update.index), [])
        if len(update.prompt_logprobs) <= PAGE_POSITIONS:
            parts.append(update)
        else:
            parts.extend(_pages(update))
        self._num_row_units += _units(update)

    def put_rejected(self, handle: Handle, error: Exception) -> None:
        rejected = encode_rejected(handle, error)
        num_bytes = rejected.ByteSize()
        self._rejected.append((rejected, num_bytes))
        self._num_refusal_units += _refusal_units(num_bytes)

    def put_load(self, load: LoadSnapshot, submits_seen: int) -> None:
        """Replaces an unsent snapshot."""
        self._load, self._submits_seen = load, submits_seen

    def put_draining(self, reason: str) -> None:
        self._draining = reason

    def put_weights_digest(self, digest: str) -> None:
        self._weights_digest = digest

    def forget(self, handle: Handle) -> None:
        """The request was cancelled by its gateway: what waits for it is dropped."""
        for key in [key for key in self._waiting if key[0] == handle]:
            self._num_row_units -= sum(_units(part) for part in self._waiting.pop(key))

    def take(self) -> pb.EngineFrame | None:
        """The next frame, at most about FRAME_UNITS and MAX_REJECTED_BYTES large; None when there is nothing to say."""
        if self.is_empty:
            return None
        frame = pb.EngineFrame(rejected=self._take_rejected())
        if self._waiting:
            frame.updates.CopyFrom(encode_updates(self._take_rows()))
        if self._load is not None:
            frame.load.CopyFrom(encode_load(self._load))
            frame.submits_seen = self._submits_seen
            self._load = None
        if self._draining is not None:
            frame.draining.reason = self._draining
            self._draining = None
        frame.weights_digest, self._weights_digest = self._weights_digest, ""
        return frame

    def _take_rejected(self) -> list[pb.Rejected]:
        """In order, until they fill their part of a frame."""
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
        """Sequence by sequence until the frame is full. One that did not fit goes to the end of the line, others get between its pages."""
        if self._num_row_units <= FRAME_UNITS:
            waiting, self._waiting, self._num_row_units = self._waiting, {}, 0
            for (handle, _), parts in waiting.items():
                yield handle, parts[0] if len(parts) == 1 else merge(parts)
            return
        room = FRAME_UNITS
        for key in list(self._waiting):
            if room <= 0:
                return
            parts = self._waiting.pop(key)
            taken = 0
            while taken < len(parts) and room > 0:
                room -= _units(parts[taken])
                taken += 1
            if taken < len(parts):
                self._waiting[key] = parts[taken:]
            self._num_row_units -= sum(_units(part) for part in parts[:taken])
            yield key[0], merge(parts[:taken])


def merge(parts: list[SequenceUpdate]) -> SequenceUpdate:
    """Consecutive updates of one sequence as one. Raises ValueError for updates of different sequences."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    if any((part.request_id, part.epoch, part.index) != (first.request_id, first.epoch, first.index) for part in parts):
        raise ValueError("only updates of one sequence can be merged")
    cached = [part.num_cached_tokens for part in parts if part.num_cached_tokens is not None]
    queue_time = [part.queue_time_s for part in parts if part.queue_time_s is not None]
    return last._replace(
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
        num_cached_tokens=cached[0] if cached else None,
        queue_time_s=queue_time[0] if queue_time else None,
    )


def _pages(update: SequenceUpdate) -> Iterator[SequenceUpdate]:
    """Prompt logprobs in pages; tokens and the end travel with the last one."""
    entries = update.prompt_logprobs
    while len(entries) > PAGE_POSITIONS:
        yield SequenceUpdate(request_id=update.request_id, epoch=update.epoch, index=update.index, prompt_logprobs=entries[:PAGE_POSITIONS])
        entries = entries[PAGE_POSITIONS:]
    yield update if entries is update.prompt_logprobs else update._replace(prompt_logprobs=entries)


def _refusal_units(num_bytes: int) -> int:
    return REFUSAL_UNITS + num_bytes // REFUSAL_BYTES_PER_UNIT


def _units(update: SequenceUpdate) -> int:
    if not update.logprobs and not update.prompt_logprobs:
        return len(update.token_ids)
    return len(update.token_ids) + _entries(update.logprobs) + _entries(update.prompt_logprobs)


def _entries(positions: Sequence[TokenLogprobs]) -> int:
    return sum(1 + len(position.top_ids) for position in positions)
