"""Converts a LoadSnapshot, an engine's report of its load, to the message Load and back."""

from __future__ import annotations

from typing import Any

from headrace.core.load import LABELLED_COUNTERS, PLAIN_COUNTERS, STEP_BOUNDS_S, ClassLoad, EngineCounters, LoadSnapshot
from headrace.core.request import PriorityClass
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.same_fields import SameFields
from headrace.wire.handles import MalformedFrame

_LOAD = SameFields(LoadSnapshot, pb.Load, but=("counters", "classes"))


def encode_load(snapshot: LoadSnapshot) -> pb.Load:
    classes = [pb.ClassLoad(**each._asdict()) for each in snapshot.classes]
    return _LOAD.encode(snapshot, classes=classes, counters=_encode_counters(snapshot.counters))


def decode_load(message: pb.Load) -> LoadSnapshot:
    """Raises MalformedFrame when the number of step buckets or of priority classes differs from this version's."""
    if len(message.classes) not in (0, len(PriorityClass)):
        raise MalformedFrame(f"load: {len(message.classes)} classes, not {len(PriorityClass)}")
    classes = tuple(ClassLoad(each.num_running, each.num_waiting, each.num_queued_tokens) for each in message.classes)
    return _LOAD.decode(message, classes=classes, counters=_decode_counters(message.counters))


def _encode_counters(counters: EngineCounters) -> pb.Counters:
    return pb.Counters(
        plain={name: getattr(counters, name) for name in PLAIN_COUNTERS},
        **{name: getattr(counters, name) for name in LABELLED_COUNTERS},
        step_seconds=counters.step_seconds,
        step_buckets=counters.step_buckets,
    )


def _decode_counters(message: pb.Counters) -> EngineCounters:
    if len(message.step_buckets) != len(STEP_BOUNDS_S) + 1:
        raise MalformedFrame(f"load: {len(message.step_buckets)} step buckets, not {len(STEP_BOUNDS_S) + 1}")
    plain = dict(message.plain)
    rows: dict[str, Any] = {name: plain.get(name, 0) for name in PLAIN_COUNTERS}
    rows |= {name: dict(getattr(message, name)) for name in LABELLED_COUNTERS}
    return EngineCounters(**rows, step_seconds=message.step_seconds, step_buckets=list(message.step_buckets))
