"""Dispatches gateways' commands to the engine, and each of the engine's updates to the stream of its attempt.

A request lives on the stream that submitted it: when the stream ends, all of its requests are cancelled. `routes` has the stream of each
attempt. Not here: gRPC, hellos, heartbeats and drain (`service`), frames and their bounds (`gateway_stream`, `unsent`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.load import LoadSnapshot
from headrace.core.model_info import ModelInfo
from headrace.core.numerics import may_resume
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected
from headrace.engine.server.gateway_stream import GatewayStream
from headrace.engine.server.outbox import Updates
from headrace.engine.server.routes import Routes
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import check_known_fields, decode_cancel, decode_finish, decode_submit
from headrace.wire.handles import Handle, MalformedFrame


class ServedEngine(Protocol):
    """The interface that the server needs of `engine.loop.Engine`. Every method may be called from any thread and returns at once."""

    info: ModelInfo

    @property
    def clock(self) -> Clock: ...

    def submit(self, request: EngineRequest) -> None:
        """Hand a request in. Its updates come through the outbox, under the request's epoch."""
        ...

    def cancel(self, request_id: RequestId) -> None: ...

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None: ...

    def snapshot(self) -> LoadSnapshot: ...


class RequestDispatcher:
    """Open requests of one engine, over all streams. Lives on the asyncio loop.

    draining  why no new request is taken; None: new requests are taken
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.draining: str | None = None
        self._engine = engine
        self._routes: Routes[GatewayStream] = Routes()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    def take(self, stream: GatewayStream, command: pb.Command) -> None:
        """Carry out a gateway's command. Raises MalformedFrame, which ends the stream, for a command that breaks the format."""
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
        """Cancel all requests of a stream that has ended."""
        for route in self._routes.of_stream(stream):
            self._routes.close(route)
            self._engine.cancel(route.request_id)

    def deliver(self, updates: Updates) -> None:
        """Put one step's updates into the unsent frames of their streams. Updates of a cancelled or replaced attempt are dropped."""
        for update in updates:
            route = self._routes.of_request(update.request_id)
            if route is None or route.attempt != update.epoch:
                continue
            if isinstance(update, Rejected):
                route.stream.unsent.put_rejected(route.handle, update.error)
                self._routes.close(route)
            else:
                route.stream.unsent.put(route.handle, update)
                if update.finish is not None:
                    self._routes.sequence_ended(route, update.index)

    def check(self, streams: Iterable[GatewayStream]) -> None:
        """Raise AssertionError when a route is lost, or kept by a stream that is none of `streams`."""
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
        self._engine.submit(replace(request, epoch=route.attempt))

    def _cancel(self, stream: GatewayStream, handle: Handle) -> None:
        if (route := self._routes.of_handle(stream, handle)) is not None:
            self._routes.close(route)
            self._engine.cancel(route.request_id)
            stream.unsent.forget(handle)

    def _finish(self, stream: GatewayStream, message: pb.Finish) -> None:
        handle, index, keep_tokens, reason = decode_finish(message)
        if (route := self._routes.of_handle(stream, handle)) is not None and index in route.running:
            self._engine.finish(route.request_id, index, keep_tokens, reason)
