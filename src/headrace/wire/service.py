"""Defines what both ends share: method names, protocol version, times, channel limits, the names of attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from headrace.core.errors import HeadraceError
from headrace.core.ids import RequestId
from headrace.core.model_info import ModelInfo

PROTOCOL_VERSION = 3
"""Raised when an older peer would misread a frame; added fields do not raise it."""

INFER = "headrace.wire.v1.Infer"
CONTROL = "headrace.wire.v1.Control"
CONNECT = f"/{INFER}/Connect"
DRAIN = f"/{CONTROL}/Drain"
SNAPSHOT = f"/{CONTROL}/Snapshot"

HEARTBEAT_S = 0.25

SILENT_AFTER_S = 0.75
"""Silence for three heartbeats: open requests wait on."""

NOT_READING_AFTER_S = 1.5
"""Six of the gateway's own heartbeats are unread: the engine gets no new work."""

READ_TOKENS_PER_S = 200_000
"""Heartbeats may wait behind a large Submit for as long as that one needs."""

LEASE_S = 10.0
"""Silence of the engine, or an end that does not read, for this long ends the stream."""

MAX_MESSAGE_BYTES = 16 * 2**20

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Each connection attempt stands alone: a shared subchannel would keep its own, much longer back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
)
TLS_CHANNEL_OPTIONS = tuple(option for option in CHANNEL_OPTIONS if option[0] != "grpc.default_authority")
"""The engine's certificate must be for the host that was dialled."""

SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


class Mismatch(HeadraceError):
    """Retrying helps only after one end was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A fact that is left out is not checked."""

    digests: Mapping[str, str] = field(default_factory=dict)
    vocab_size: int = 0


def check_protocol(version: int, peer: str) -> None:
    """Raises Mismatch."""
    if version != PROTOCOL_VERSION:
        raise Mismatch(
            f"protocol version: {peer} speaks {version}, this side {PROTOCOL_VERSION}. Run the same release on both ends: "
            "a rollout across protocol versions takes a restart."
        )


def check_model(model: ModelInfo, expect: Expectation) -> None:
    """Raises Mismatch naming the first thing that differs."""
    for kind, digest in expect.digests.items():
        have = model.digests.get(kind)
        if digest and have and have != digest:
            raise Mismatch(f"{kind} digest: the engine has {have[:16]}, the gateway {digest[:16]}. Both must read the same model folder.")
    if expect.vocab_size and expect.vocab_size != model.vocab_size:
        raise Mismatch(f"vocabulary: the engine has {model.vocab_size} entries, the gateway {expect.vocab_size}.")


Handle = NewType("Handle", int)
"""Chosen by the gateway and never reused on its stream."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a request at one replica; a request that is sent again is a new attempt with a new handle."""

    request_id: RequestId
    epoch: int


class MalformedFrame(HeadraceError):
    """The stream that carried the frame is closed, and no other stream."""
