"""Converts ModelInfo, what the engine's hello says of its model, to the message ModelFacts and back."""

from __future__ import annotations

from typing import Any

from headrace.core.kvgroup import KvGroup
from headrace.core.model_info import ModelInfo
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec.same_fields import SameFields
from headrace.wire.handles import MalformedFrame

_FACTS = SameFields(ModelInfo, pb.ModelFacts, but=("costly_context", "kv_groups", "sampling_defaults"))
_GROUP = SameFields(KvGroup, pb.KvGroup)


def encode_model_info(info: ModelInfo) -> pb.ModelFacts:
    return _FACTS.encode(
        info,
        kv_groups=[_GROUP.encode(group) for group in info.kv_groups],
        sampling_defaults={key: _encode_scalar(key, value) for key, value in info.sampling_defaults.items()},
    )


def decode_model_info(message: pb.ModelFacts) -> ModelInfo:
    """Raises MalformedFrame when a size is 0, or the pools and the KV groups differ in number."""
    if not message.vocab_size or not message.max_model_len or not message.block_size:
        raise MalformedFrame("model: vocab_size, max_model_len and block_size must be positive")
    if len(message.num_blocks) != len(message.kv_groups):
        raise MalformedFrame(f"model: {len(message.num_blocks)} pool sizes for {len(message.kv_groups)} KV groups")
    return _FACTS.decode(
        message,
        kv_groups=tuple(_GROUP.decode(group) for group in message.kv_groups),
        sampling_defaults={key: _decode_scalar(key, value) for key, value in message.sampling_defaults.items()},
    )


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
