"""Types that every codec of the wire uses: the handle that stands for a request in frames, and the error of a malformed frame.

A gateway that sends a request to a replica makes an attempt, and names it by an integer handle on the gRPC stream between the two. A
request that is sent again, to another replica or on another stream, is a new attempt with a new handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from headrace.core.errors import HeadraceError
from headrace.core.ids import RequestId

Handle = NewType("Handle", int)
"""Number of an attempt on one stream. The gateway chooses the handle and never reuses it on the stream. Updates with a handle that the
gateway has forgotten belong to an ended attempt, and are dropped."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a request at one replica, which a handle stands for.

    epoch  see `EngineRequest`
    """

    request_id: RequestId
    epoch: int


class MalformedFrame(HeadraceError):
    """A frame that is not valid protobuf, or has invalid content. The stream that carried the frame is closed, and no other stream."""
