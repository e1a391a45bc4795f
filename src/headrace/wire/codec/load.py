"""LoadSnapshot <-> Load."""

from __future__ import annotations

from headrace.core.load import STEP_BOUNDS_S, ClassLoad, EngineCounters, LoadSnapshot
from headrace.core.request import PriorityClass
from headrace.wire import headrace_pb2 as pb
from headrace.wire.handles import MalformedFrame


def encode_load(snapshot: LoadSnapshot) -> pb.Load:
    counters = snapshot.counters
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
        counters=pb.Counters(
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_hit_tokens=counters.prefix_cache_hit_tokens,
            prefix_cache_query_tokens=counters.prefix_cache_query_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            step_seconds=counters.step_seconds,
            step_buckets=list(counters.step_buckets),
            finished=counters.finished,
            failures=counters.failures,
        ),
    )


def decode_load(message: pb.Load) -> LoadSnapshot:
    """Raises MalformedFrame when the step histogram has other buckets than ours, or there are other classes."""
    counters = message.counters
    if len(counters.step_buckets) != len(STEP_BOUNDS_S) + 1:
        raise MalformedFrame(f"load: {len(counters.step_buckets)} step buckets, not {len(STEP_BOUNDS_S) + 1}")
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
        counters=EngineCounters(
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_hit_tokens=counters.prefix_cache_hit_tokens,
            prefix_cache_query_tokens=counters.prefix_cache_query_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            step_seconds=counters.step_seconds,
            step_buckets=list(counters.step_buckets),
            finished=dict(counters.finished),
            failures=dict(counters.failures),
        ),
    )
