"""Dispatches gateways' commands to the engine, and each of the engine's updates to the stream of its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.ids import RequestId
from headrace.core.model_info import may_resume
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.loop import Engine
from headrace.engine.server.gateway_stream import GatewayStream
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import check_known_fields, decode_cancel, decode_finish, decode_submit
from headrace.wire.service import Handle, MalformedFrame

Stream = TypeVar("Stream", bound=Hashable)


@dataclass(slots=True)
class Route(Generic[Stream]):
    """epoch         the gateway's; a higher one replaces a lower one
    engine_epoch  what the engine gets instead: a gateway may send a request again with the same epoch
    """

    request_id: RequestId
    epoch: int
    engine_epoch: int
    stream: Stream
    handle: Handle
    running: set[int]


@dataclass(slots=True)
class Routes(Generic[Stream]):
    """A route is open from Submit until every sequence of the request has finished, was rejected or cancelled, or the stream ended. An
    attempt with a higher epoch replaces an older one of the same request, on whichever stream that came.
    """

    _by_request: dict[RequestId, Route[Stream]] = field(default_factory=dict)
    _by_handle: dict[tuple[Stream, Handle], Route[Stream]] = field(default_factory=dict)
    _num_opened: int = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def open(self, stream: Stream, handle: Handle, request_id: RequestId, epoch: int, indices: range) -> Route[Stream]:
        """Raises ValueError if the request or the handle has a route already."""
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
        route.running.discard(index)
        if not route.running:
            self.close(route)

    def check(self) -> None:
        by_handle = {id(route) for route in self._by_handle.values()}
        assert {id(route) for route in self._by_request.values()} == by_handle, "a route is known by one name only"
        assert all(route.running for route in self._by_request.values()), "a finished route is still open"


Updates = list[SequenceUpdate | Rejected]
Value = TypeVar("Value")


class AsyncioOutbox:
    """Passes updates from the engine's thread to the asyncio loop. Updates are dropped once the asyncio loop is closed. deliver: called on
    that loop
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.deliver: Callable[[Updates], None] | None = None

    def __call__(self, updates: Updates) -> None:
        call_unless_closed(self._loop, self._arrive, updates)

    def _arrive(self, updates: Updates) -> None:
        if self.deliver is not None:
            self.deliver(updates)


def call_unless_closed(loop: asyncio.AbstractEventLoop, call: Callable[[Value], None], value: Value) -> None:
    """Does nothing if the loop is closed, even if that happens concurrently."""
    try:
        loop.call_soon_threadsafe(call, value)
    except RuntimeError:
        if not loop.is_closed():
            raise


class RequestDispatcher:
    """Lives on the asyncio loop. draining: why no new request is taken"""

    def __init__(self, engine: Engine) -> None:
        self.draining: str | None = None
        self._engine = engine
        self._routes: Routes[GatewayStream] = Routes()

    @property
    def num_open(self) -> int:
        return len(self._routes)

    def take(self, stream: GatewayStream, command: pb.Command) -> None:
        """Raises MalformedFrame, which ends the stream."""
        check_known_fields("command", command)
        match command.WhichOneof("kind"):
            case "submit":
                self._submit(stream, command.submit)
            case "cancel":
                self._cancel(stream, decode_cancel(command.cancel))
            case "finish":
                self._finish(stream, command.finish)
            case _:
                raise MalformedFrame("a command of unknown kind")

    def cancel_all(self, stream: GatewayStream) -> None:
        for route in self._routes.of_stream(stream):
            self._routes.close(route)
            self._engine.cancel(route.request_id)

    def deliver(self, updates: Updates) -> None:
        for update in updates:
            route = self._routes.of_request(update.request_id)
            if route is None or route.engine_epoch != update.epoch:
                continue
            if isinstance(update, Rejected):
                route.stream.unsent.put_rejected(route.handle, update.error)
                self._routes.close(route)
            else:
                route.stream.unsent.put(route.handle, update)
                if update.finish is not None:
                    self._routes.sequence_ended(route, update.index)

    def check(self, streams: Iterable[GatewayStream]) -> None:
        self._routes.check()
        known = sum(len(self._routes.of_stream(stream)) for stream in streams)
        assert known == len(self._routes), "a route outlived its stream"

    def _submit(self, stream: GatewayStream, message: pb.Submit) -> None:
        handle = Handle(message.handle)
        if self._routes.of_handle(stream, handle) is not None:
            raise MalformedFrame(f"submit: handle {handle} is in use")
        stream.num_submits += 1
        try:
            self._start_attempt(stream, handle, decode_submit(message, self._engine.clock()))
        except MalformedFrame:
            raise
        except HeadraceError as error:
            stream.unsent.put_rejected(handle, error)
            stream.wake()

    def _start_attempt(self, stream: GatewayStream, handle: Handle, request: EngineRequest) -> None:
        if self.draining is not None:
            raise Unavailable(f"this replica takes no new work: {self.draining}")
        request.params.checked()
        if request.output_ids and not may_resume(request.numerics_digest, self._engine.info.numerics_digest):
            raise Unavailable("this replica cannot go on from output_ids: their numerics_digest is not its own, or not known yet")
        older = self._routes.of_request(request.request_id)
        if older is not None:
            if older.epoch >= request.epoch:
                raise InvalidRequest("epoch", f"an epoch above {older.epoch}, which is still open", request.epoch)
            self._routes.close(older)
            self._engine.cancel(request.request_id)
        route = self._routes.open(stream, handle, request.request_id, request.epoch, request.indices)
        self._engine.submit(replace(request, epoch=route.engine_epoch))

    def _cancel(self, stream: GatewayStream, handle: Handle) -> None:
        if (route := self._routes.of_handle(stream, handle)) is not None:
            self._routes.close(route)
            self._engine.cancel(route.request_id)
            stream.unsent.forget(handle)

    def _finish(self, stream: GatewayStream, message: pb.Finish) -> None:
        handle, index, keep_tokens, reason = decode_finish(message)
        if (route := self._routes.of_handle(stream, handle)) is not None and index in route.running:
            self._engine.finish(route.request_id, index, keep_tokens, reason)
