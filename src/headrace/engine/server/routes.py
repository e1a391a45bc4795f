"""Records which stream carries which attempt of a request. Pure bookkeeping; each request ends exactly once.

A route is open from Submit until every sequence of the request has finished, was rejected or cancelled, or the stream ended. An attempt
with a higher epoch replaces an older one of the same request, on whichever stream that came. The engine's updates about a replaced or
cancelled attempt have no route and are dropped. The engine knows each attempt by a number of its own, since a gateway may cancel a request
and send it again with the same epoch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.core.ids import RequestId
from headrace.wire.handles import Handle

Stream = TypeVar("Stream", bound=Hashable)


@dataclass(slots=True)
class Route(Generic[Stream]):
    """One attempt on its stream.

    epoch    the gateway's epoch; a higher one replaces a lower one
    attempt  the epoch that the engine gets; no two attempts have the same
    running  indices of the sequences that have not finished
    """

    request_id: RequestId
    epoch: int
    attempt: int
    stream: Stream
    handle: Handle
    running: set[int]


@dataclass(slots=True)
class Routes(Generic[Stream]):
    """All open routes of one engine process."""

    _by_request: dict[RequestId, Route[Stream]] = field(default_factory=dict)
    _by_handle: dict[tuple[Stream, Handle], Route[Stream]] = field(default_factory=dict)
    _num_opened: int = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def open(self, stream: Stream, handle: Handle, request_id: RequestId, epoch: int, indices: range) -> Route[Stream]:
        """Open a route; an older attempt must be closed before. Raises ValueError if the request or the handle has a route already."""
        if request_id in self._by_request or (stream, handle) in self._by_handle:
            raise ValueError(f"request {request_id} or handle {handle} is routed already")
        self._num_opened += 1
        route = Route(request_id, epoch, self._num_opened, stream, handle, set(indices))
        self._by_request[request_id] = self._by_handle[stream, handle] = route
        return route

    def of_request(self, request_id: RequestId) -> Route[Stream] | None:
        return self._by_request.get(request_id)

    def of_handle(self, stream: Stream, handle: Handle) -> Route[Stream] | None:
        return self._by_handle.get((stream, handle))

    def of_stream(self, stream: Stream) -> list[Route[Stream]]:
        return [route for route in self._by_request.values() if route.stream == stream]

    def close(self, route: Route[Stream]) -> None:
        self._by_request.pop(route.request_id, None)
        self._by_handle.pop((route.stream, route.handle), None)

    def sequence_ended(self, route: Route[Stream], index: int) -> None:
        """Note that a sequence has ended. The last one closes the route."""
        route.running.discard(index)
        if not route.running:
            self.close(route)

    def check(self) -> None:
        """Raises AssertionError unless both maps hold the same open routes."""
        by_handle = {id(route) for route in self._by_handle.values()}
        assert {id(route) for route in self._by_request.values()} == by_handle, "a route is known by one name only"
        assert all(route.running for route in self._by_request.values()), "a finished route is still open"
