"""ModelInfo <-> ModelFacts: what the engine's hello says of its model."""

from __future__ import annotations

from typing import Any

from headrace.core.kvgroup import KvGroup
from headrace.core.model_info import ModelInfo
from headrace.wire import headrace_pb2 as pb
from headrace.wire.handles import MalformedFrame


def encode_model_info(info: ModelInfo) -> pb.ModelFacts:
    return pb.ModelFacts(
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        kv_groups=[_encode_group(group) for group in info.kv_groups],
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        dtype=info.dtype,
        weight_bytes=info.weight_bytes,
        sampling_defaults={key: _encode_scalar(key, value) for key, value in info.sampling_defaults.items()},
        digests=info.digests,
        numerics=info.numerics,
        decided=info.decided,
        queue_policy=info.queue_policy,
    )


def decode_model_info(message: pb.ModelFacts) -> ModelInfo:
    """Raises MalformedFrame when the facts cannot be a model's."""
    if not message.vocab_size or not message.max_model_len or not message.block_size:
        raise MalformedFrame("model: vocab_size, max_model_len and block_size must be positive")
    if len(message.num_blocks) != len(message.kv_groups):
        raise MalformedFrame(f"model: {len(message.num_blocks)} pool sizes for {len(message.kv_groups)} KV groups")
    return ModelInfo(
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        kv_groups=tuple(_decode_group(group) for group in message.kv_groups),
        block_size=message.block_size,
        num_blocks=tuple(message.num_blocks),
        dtype=message.dtype,
        weight_bytes=message.weight_bytes,
        sampling_defaults={key: _decode_scalar(key, value) for key, value in message.sampling_defaults.items()},
        digests=dict(message.digests),
        numerics=dict(message.numerics),
        decided=tuple(message.decided),
        queue_policy=message.queue_policy,
    )


def _encode_group(group: KvGroup) -> pb.KvGroup:
    return pb.KvGroup(
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype_bytes=group.dtype_bytes,
        window=group.window,
        scale_bytes=group.scale_bytes,
    )


def _decode_group(message: pb.KvGroup) -> KvGroup:
    return KvGroup(
        layers=tuple(message.layers),
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype_bytes=message.dtype_bytes,
        window=message.window if message.HasField("window") else None,
        scale_bytes=message.scale_bytes,
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
