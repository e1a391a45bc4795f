"""The handle of one attempt of a request on one stream, and the error of a frame that breaks the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from headrace.core.errors import HeadraceError
from headrace.core.ids import RequestId

Handle = NewType("Handle", int)
"""Chosen by the gateway, never reused on its stream: updates for a forgotten handle belong to an old attempt and are dropped."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a handle stands for."""

    request_id: RequestId
    epoch: int


class MalformedFrame(HeadraceError):
    """A frame that parses as protobuf but breaks the format. The stream that carried it is closed, nothing else happens."""
