"""The engine's end of the wire: streams of gateways, routes of requests, heartbeats, drain.

grpc.aio on the main thread. The loop's thread hands its updates over once per step (`AsyncioOutbox`), everything else here runs on the
asyncio loop. A request lives on the stream that submitted it: a stream that ends, for whatever reason, cancels all of its requests.
Heartbeats come from here and not from the loop, so that they go on, and tell of the step's age, while a step runs or hangs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.load import LoadSnapshot
from headrace.core.model_info import ModelInfo
from headrace.core.numerics import WEIGHTS, may_resume
from headrace.core.request import EngineRequest
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.server.gateway_stream import GatewayStream, StreamLost
from headrace.engine.server.routes import Routes
from headrace.engine.server.unsent import MAX_UNITS
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import check_known_fields, decode_cancel, decode_finish, decode_submit, encode_load, encode_model_info
from headrace.wire.handles import Handle, MalformedFrame
from headrace.wire.service import (
    CONTROL,
    HEARTBEAT_S,
    INFER,
    LEASE_S,
    PROTOCOL_VERSION,
    SERVER_OPTIONS,
    Expectation,
    Mismatch,
    check_model,
    check_protocol,
)
from headrace.wire.target import GrpcTarget, check_private, token_matches

log = logging.getLogger(__name__)

Updates = list[SequenceUpdate | Rejected]
Value = TypeVar("Value")
Asked = TypeVar("Asked", pb.DrainRequest, pb.SnapshotRequest)


class ServedEngine(Protocol):
    """What the service needs of `engine.loop.Engine`. Every method may be called from any thread and returns at once."""

    info: ModelInfo

    @property
    def clock(self) -> Clock: ...

    def submit(self, request: EngineRequest) -> None:
        """What becomes of it comes through the outbox, under the request's epoch."""
        ...

    def cancel(self, request_id: RequestId) -> None: ...

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None: ...

    def snapshot(self) -> LoadSnapshot: ...


class AsyncioOutbox:
    """The engine's outbox: carries a step's updates from the loop's thread to the asyncio loop, one call per step.

    Once the asyncio loop is closed, updates are dropped: nobody is left to send them.
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
    """`call(value)` on the loop, from another thread; nothing when the loop is closed, also when that happens at this very moment."""
    try:
        loop.call_soon_threadsafe(call, value)
    except RuntimeError:
        if not loop.is_closed():
            raise


class EngineService:
    """Serves one engine at one address until `stop`."""

    def __init__(
        self,
        engine: ServedEngine,
        bridge: AsyncioOutbox,
        target: GrpcTarget,
        *,
        replica: str,
        on_drain: Callable[[str], None] | None = None,
        lease_s: float = LEASE_S,
        max_unread: int = MAX_UNITS,
    ) -> None:
        """
        bridge    the outbox the engine was made with
        replica   name of this replica, for hellos and messages
        on_drain  called when somebody asks for a drain over the wire; default: `drain` itself
        lease_s, max_unread   a gateway that takes nothing for this long, or leaves this many tokens unread, loses its stream
        """
        self._engine = engine
        self._target = target
        self._on_drain = on_drain or self.drain
        self._lease_s, self._max_unread = lease_s, max_unread
        self._streams: list[GatewayStream] = []
        self._routes: Routes[GatewayStream] = Routes()
        self._server: grpc.aio.Server | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._draining: str | None = None
        self._drained = asyncio.Event()
        self.hello = pb.EngineHello(
            protocol_version=PROTOCOL_VERSION,
            instance_id=secrets.token_hex(8),
            replica=replica,
            model=encode_model_info(engine.info),
        )
        bridge.deliver = self._deliver

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    @property
    def heartbeat(self) -> asyncio.Task[None]:
        """Runs as long as the service does; a process whose heartbeat ended must end too. Raises RuntimeError before `start`."""
        if self._heartbeat is None:
            raise RuntimeError("the service was not started")
        return self._heartbeat

    async def start(self) -> None:
        """Binds and serves. Raises ConfigError for a socket directory open to others, OSError when the address is taken."""
        if self._target.path is not None:
            check_private(self._target.path)
            self._target.path.unlink(missing_ok=True)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers(self._handlers())
        try:
            bound = server.add_insecure_port(self._target.address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._target.address}: {error}") from error
        self.port = bound
        await server.start()
        self._server = server
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")

    async def stop(self) -> None:
        """Ends every stream; what is still open is cancelled at the engine."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=None)
        if self._target.path is not None:
            self._target.path.unlink(missing_ok=True)

    def drain(self, reason: str) -> None:
        """No new work from now on; gateways are told. Running requests go on, `drained` waits for them."""
        if self._draining is None:
            self._draining = reason
            for stream in self._streams:
                stream.unsent.put_draining(reason)
                stream.wake()
            self._note_drained()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until a drain has nothing open any more and everything is sent. False: the time was not enough."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
                while any(not stream.is_flushed for stream in self._streams):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raises AssertionError when a route is lost or kept by a stream that ended."""
        self._routes.check()
        known = sum(len(self._routes.of_stream(stream)) for stream in self._streams)
        assert known == len(self._routes), "a route outlived its stream"

    # the wire's side

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Raw bytes in and out: parsing is ours, so that malformed frames end in a clean status."""
        infer = {"Connect": grpc.stream_stream_rpc_method_handler(self._connect)}
        control = {
            "Drain": grpc.unary_unary_rpc_method_handler(self._control_drain),
            "Snapshot": grpc.unary_unary_rpc_method_handler(self._control_snapshot),
        }
        return (grpc.method_handlers_generic_handler(INFER, infer), grpc.method_handlers_generic_handler(CONTROL, control))

    async def _connect(self, _requests: object, context: Any) -> None:
        """Infer.Connect: one gateway, from hello to hang-up."""
        await self._authorize(context)
        stream = GatewayStream(context, on_command=self._take_command)
        status: tuple[grpc.StatusCode, str] | None = None
        try:
            await self._greet(stream)
            await stream.pump()
        except Mismatch as error:
            status = (grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except MalformedFrame as error:
            status = (grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StreamLost as error:
            status = (grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self._hang_up(stream)
        if status is not None:
            log.warning("stream of a gateway ended: %s", status[1])
            await context.abort(*status)

    async def _authorize(self, context: Any) -> None:
        if not token_matches(context.invocation_metadata() or (), self._target.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the engine's token is missing or wrong")

    async def _greet(self, stream: GatewayStream) -> None:
        hello = await stream.read_hello()
        check_protocol(hello.protocol_version, "the gateway")  # first: what another version's fields mean is not known here
        check_known_fields("hello", hello)
        check_model(self._engine.info, Expectation(digests=dict(hello.digests), vocab_size=hello.vocab_size))
        self._streams.append(stream)  # before the hello is written: what changes meanwhile waits in `unsent` and follows it
        await stream.send(pb.EngineFrame(hello=self.hello))
        self._send_load()
        if self._draining is not None:
            stream.unsent.put_draining(self._draining)
            stream.wake()

    def _hang_up(self, stream: GatewayStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
        for route in self._routes.of_stream(stream):
            self._routes.close(route)
            self._engine.cancel(route.request_id)
        self._note_drained()

    def _take_command(self, stream: GatewayStream, command: pb.Command) -> None:
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

    def _submit(self, stream: GatewayStream, message: pb.Submit) -> None:
        handle = Handle(message.handle)
        if self._routes.of_handle(stream, handle) is not None:
            raise MalformedFrame(f"submit: handle {handle} is in use")
        stream.num_submits += 1
        try:
            self._admit(stream, handle, decode_submit(message, self._engine.clock()))
        except MalformedFrame:
            raise
        except HeadraceError as error:
            stream.unsent.put_rejected(handle, error)
            stream.wake()

    def _admit(self, stream: GatewayStream, handle: Handle, request: EngineRequest) -> None:
        if self._draining is not None:
            raise Unavailable(f"this replica takes no new work: {self._draining}")
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
            self._note_drained()

    def _finish(self, stream: GatewayStream, message: pb.Finish) -> None:
        handle, index, keep_tokens, reason = decode_finish(message)
        if (route := self._routes.of_handle(stream, handle)) is not None and index in route.running:
            self._engine.finish(route.request_id, index, keep_tokens, reason)

    # the engine's side

    def _deliver(self, updates: Updates) -> None:
        """One step's updates, each to the stream of its attempt; all streams get the load as of now."""
        for update in updates:
            route = self._routes.of_request(update.request_id)
            if route is None or route.attempt != update.epoch:
                continue  # what is still said of an attempt that was cancelled or replaced
            if isinstance(update, Rejected):
                route.stream.unsent.put_rejected(route.handle, update.error)
                self._routes.close(route)
            else:
                route.stream.unsent.put(route.handle, update)
                if update.finish is not None:
                    self._routes.sequence_ended(route, update.index)
        self._send_load()
        self._note_drained()

    def _send_load(self) -> LoadSnapshot:
        """All streams get the load as of now."""
        load = self._engine.snapshot()
        for stream in self._streams:
            stream.unsent.put_load(load, stream.num_submits)
            stream.wake()
        return load

    async def _beat(self) -> None:
        while True:
            self._send_load()
            self._send_weights_digest()
            for stream in self._streams:
                stream.check_lease(HEARTBEAT_S, self._lease_s, self._max_unread)
            await asyncio.sleep(HEARTBEAT_S)

    def _send_weights_digest(self) -> None:
        """Once, when the engine has learnt it after the service began."""
        digest = self._engine.info.numerics.get(WEIGHTS, "")
        if digest == self.hello.model.numerics.get(WEIGHTS, ""):
            return
        self.hello.model.CopyFrom(encode_model_info(self._engine.info))
        for stream in self._streams:
            stream.unsent.put_weights_digest(digest)
            stream.wake()

    def _note_drained(self) -> None:
        if self._draining is not None and not self._routes:
            self._drained.set()

    # operators

    async def _control_drain(self, data: bytes, context: Any) -> bytes:
        asked = await self._read_control(pb.DrainRequest, data, context)
        self._on_drain(asked.reason or "asked to drain")
        return pb.DrainReply(num_open=self.num_open).SerializeToString()

    async def _control_snapshot(self, data: bytes, context: Any) -> bytes:
        await self._read_control(pb.SnapshotRequest, data, context)
        reply = pb.SnapshotReply(
            hello=self.hello,
            load=encode_load(self._send_load()),
            draining=self._draining is not None,
            num_streams=len(self._streams),
            num_open=self.num_open,
        )
        return reply.SerializeToString()

    async def _read_control(self, kind: type[Asked], data: bytes, context: Any) -> Asked:
        """What an operator asks. Ends the call with a status unless the token is right and the message is of this version."""
        await self._authorize(context)
        try:
            asked = kind.FromString(data)
            check_known_fields(kind.DESCRIPTOR.name, asked)
        except (DecodeError, MalformedFrame) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return asked
