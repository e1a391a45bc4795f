"""Converts what an engine says of itself to messages and back: ModelInfo in its hello, and LoadSnapshot in its reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.core.adapters import MAX_ADAPTERS
from headrace.core.load import LABELLED_COUNTERS, PLAIN_COUNTERS, STEP_BOUNDS_S, ClassLoad, EngineCounters, LoadSnapshot
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.model_names import MODEL_NAME
from headrace.core.request import PriorityClass
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.fields import SameFields, printable
from headrace.wire.service import MalformedFrame

_OF_THE_ENGINE = ("costly_context", "token_flops", "pair_flops", "peak_read_bytes_per_s", "peak_flops_per_s")
_FACTS = SameFields(ModelInfo, pb.ModelFacts, but=(*_OF_THE_ENGINE, "kv_groups", "sampling_defaults", "adapters"))
_GROUP = SameFields(KvGroup, pb.KvGroup)


def encode_model_info(info: ModelInfo) -> pb.ModelFacts:
    return _FACTS.encode(
        info,
        kv_groups=[_GROUP.encode(group) for group in info.kv_groups],
        adapters=info.adapters,
        sampling_defaults={key: _encode_scalar(key, value) for key, value in info.sampling_defaults.items()},
    )


def decode_model_info(message: pb.ModelFacts) -> ModelInfo:
    """Raises MalformedFrame."""
    if not message.vocab_size or not message.max_model_len or not message.block_size:
        raise MalformedFrame("model: vocab_size, max_model_len and block_size must be positive")
    if len(message.num_blocks) != len(message.kv_groups):
        raise MalformedFrame(f"model: {len(message.num_blocks)} pool sizes for {len(message.kv_groups)} KV groups")
    return _FACTS.decode(
        message,
        kv_groups=tuple(_GROUP.decode(group) for group in message.kv_groups),
        adapters=decode_adapters(message.adapters),
        sampling_defaults={key: _decode_scalar(key, value) for key, value in message.sampling_defaults.items()},
    )


_ADAPTER_DIGEST = re.compile("(?:[0-9a-f]{2}){1,64}")


def decode_adapters(digests: Mapping[str, str]) -> dict[str, str]:
    """Raises MalformedFrame."""
    if len(digests) > MAX_ADAPTERS:
        raise MalformedFrame(f"adapters: {len(digests)}, more than {MAX_ADAPTERS}")
    for name, digest in digests.items():
        if MODEL_NAME.fullmatch(name) is None or _ADAPTER_DIGEST.fullmatch(digest) is None:
            raise MalformedFrame(f"adapters: {printable(name)!r} is not a model name, or its digest is not hex")
    return dict(digests)


def _encode_scalar(key: str, value: Any) -> pb.Scalar:
    # bool before int: True is an int in Python.
    if isinstance(value, bool):
        return pb.Scalar(flag=value)
    if isinstance(value, int):
        return pb.Scalar(integer=value)
    if isinstance(value, float):
        return pb.Scalar(number=value)
    if isinstance(value, str):
        return pb.Scalar(text=value)
    raise TypeError(f"sampling default {key!r} is a {type(value).__name__}; the wire carries numbers, flags and text")


def _decode_scalar(key: str, message: pb.Scalar) -> bool | int | float | str:
    match message.WhichOneof("kind"):
        case "flag":
            return message.flag
        case "integer":
            return message.integer
        case "number":
            return message.number
        case "text":
            return message.text
    raise MalformedFrame(f"sampling default {key!r} has no value")


_LOAD = SameFields(LoadSnapshot, pb.Load, but=("counters", "classes"))


def encode_load(snapshot: LoadSnapshot) -> pb.Load:
    classes = [pb.ClassLoad(**each._asdict()) for each in snapshot.classes]
    return _LOAD.encode(snapshot, classes=classes, counters=_encode_counters(snapshot.counters))


def decode_load(message: pb.Load) -> LoadSnapshot:
    """Raises MalformedFrame."""
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
