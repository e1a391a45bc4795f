"""Decodes a frame's updates into a list, by the decoder that a session reads them with."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.update import SequenceUpdate
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.update import RowExtras, UpdateRows, update_of
from headrace.wire.service import Attempt, Handle


def decode_updates(message: pb.Updates, attempt_of: Callable[[Handle], Attempt | None]) -> list[tuple[Handle, SequenceUpdate]]:
    """The rows whose handle is known. Raises: as `UpdateRows` does."""
    updates: list[tuple[Handle, SequenceUpdate]] = []
    for handle, index, token_ids, extras in UpdateRows(message):
        if (attempt := attempt_of(handle)) is not None:
            updates.append((handle, update_of(attempt, index, token_ids, RowExtras() if extras is None else extras)))
    return updates
