"""LoadSnapshot <-> Load."""

from __future__ import annotations

from typing import Any

from headrace.core.load import LABELLED_COUNTERS, PLAIN_COUNTERS, STEP_BOUNDS_S, ClassLoad, EngineCounters, LoadSnapshot
from headrace.core.request import PriorityClass
from headrace.wire import headrace_pb2 as pb
from headrace.wire.handles import MalformedFrame


def encode_load(snapshot: LoadSnapshot) -> pb.Load:
    return pb.Load(
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        kv_blocks_free=snapshot.kv_blocks_free,
        kv_blocks_cached=snapshot.kv_blocks_cached,
        kv_blocks_used=snapshot.kv_blocks_used,
        kv_blocks_total=snapshot.kv_blocks_total,
        step_age_s=snapshot.step_age_s,
        step_predicted_s=snapshot.step_predicted_s,
        loop_age_s=snapshot.loop_age_s,
        num_queued_tokens=snapshot.num_queued_tokens,
        max_num_seqs=snapshot.max_num_seqs,
        step_fixed_s=snapshot.step_fixed_s,
        step_token_s=snapshot.step_token_s,
        step_prompt_tokens=snapshot.step_prompt_tokens,
        classes=[pb.ClassLoad(**each._asdict()) for each in snapshot.classes],
        counters=_encode_counters(snapshot.counters),
    )


def decode_load(message: pb.Load) -> LoadSnapshot:
    """Raises MalformedFrame when the step histogram has other buckets than ours, or there are other classes."""
    if len(message.classes) not in (0, len(PriorityClass)):
        raise MalformedFrame(f"load: {len(message.classes)} classes, not {len(PriorityClass)}")
    return LoadSnapshot(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        kv_blocks_free=message.kv_blocks_free,
        kv_blocks_cached=message.kv_blocks_cached,
        kv_blocks_used=message.kv_blocks_used,
        kv_blocks_total=message.kv_blocks_total,
        step_age_s=message.step_age_s if message.HasField("step_age_s") else None,
        step_predicted_s=message.step_predicted_s,
        loop_age_s=message.loop_age_s,
        num_queued_tokens=message.num_queued_tokens,
        max_num_seqs=message.max_num_seqs,
        step_fixed_s=message.step_fixed_s,
        step_token_s=message.step_token_s,
        step_prompt_tokens=message.step_prompt_tokens,
        classes=tuple(ClassLoad(each.num_running, each.num_waiting, each.num_queued_tokens) for each in message.classes),
        counters=_decode_counters(message.counters),
    )


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
