"""Serves the engine's end of the wire.

The gRPC server (grpc.aio) and everything else here run on the asyncio loop of the main thread. Heartbeats are sent from here and not
from the engine's loop, so that they go on while a step runs or hangs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.model_info import WEIGHTS
from headrace.engine.loop import Engine
from headrace.engine.server.dispatcher import AsyncioOutbox, RequestDispatcher, Updates
from headrace.engine.server.gateway_stream import GatewayStream, StreamLost
from headrace.engine.server.listener import CannotListen, TcpListener
from headrace.engine.server.unsent import MAX_UNITS
from headrace.machine.private_files import check_socket_folder
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import check_known_fields, encode_load, encode_model_info
from headrace.wire.listening import REPEAT_S
from headrace.wire.service import (
    CONTROL,
    HEARTBEAT_S,
    INFER,
    LEASE_S,
    PROTOCOL_VERSION,
    SERVER_OPTIONS,
    Expectation,
    MalformedFrame,
    Mismatch,
    check_model,
    check_protocol,
)
from headrace.wire.target import GrpcTarget, token_matches, unix_address

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""Seconds between two lines about drafts."""

STREAMS_END_S = 1.0
"""Seconds in which streams may end in order; then gRPC cancels the calls, and unread bytes are lost."""

Asked = TypeVar("Asked", pb.DrainRequest, pb.SnapshotRequest)


class EngineService:
    def __init__(
        self,
        engine: Engine,
        bridge: AsyncioOutbox,
        target: GrpcTarget,
        *,
        replica: str,
        on_drain: Callable[[str], None] | None = None,
        lease_s: float = LEASE_S,
        max_unread: int = MAX_UNITS,
    ) -> None:
        """lease_s, max_unread   a gateway that takes nothing for this long, or leaves more units (of 32 bytes) unread, loses its stream"""
        self._engine = engine
        self._target = target
        self._on_drain = on_drain or self.drain
        self._lease_s, self._max_unread = lease_s, max_unread
        self._streams: list[GatewayStream] = []
        self._dispatcher = RequestDispatcher(engine)
        self._server: grpc.aio.Server | None = None
        self._listener: TcpListener | None = None
        self.address = target.address
        self._heartbeat: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._wrong_token_due_s = -math.inf
        self._announced = engine.info
        self.hello = pb.EngineHello(
            protocol_version=PROTOCOL_VERSION,
            instance_id=secrets.token_hex(8),
            replica=replica,
            model=encode_model_info(self._announced),
        )
        bridge.deliver = self._deliver

    @property
    def num_open(self) -> int:
        return self._dispatcher.num_open

    @property
    def heartbeat(self) -> asyncio.Task[None]:
        """A process whose heartbeat has ended must end too."""
        if self._heartbeat is None:
            raise RuntimeError("the service was not started")
        return self._heartbeat

    async def start(self) -> None:
        """Raises CannotListen, and ConfigError for what the address needs: the socket's directory, certificates, temporary files."""
        if self._target.path is not None:
            check_socket_folder("engine address", self._target.path)
            self._target.path.unlink(missing_ok=True)
            self._server = await self._serve_at(self._target.path)
        else:
            self._listener = TcpListener(self._target)
            try:
                self._server = await self._serve_at(self._listener.inner)
                self.address = await self._listener.start()
            except BaseException:
                await self.stop()
                raise
        self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")

    async def _serve_at(self, path: Path) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers(self._handlers())
        try:
            server.add_insecure_port(unix_address(path))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {path}: {error}") from error
        await server.start()
        return server

    async def stop(self) -> None:
        """Open requests are cancelled, and STREAMS_END_S given to the streams."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        if self._listener is not None:
            self._listener.stop_accepting()
        for stream in self._streams:
            stream.end()
        if self._server is not None:
            await self._server.stop(grace=STREAMS_END_S)
        if self._listener is not None:
            await self._listener.close()
        if self._target.path is not None:
            self._target.path.unlink(missing_ok=True)

    def drain(self, reason: str) -> None:
        if self._dispatcher.draining is None:
            self._dispatcher.draining = reason
            for stream in self._streams:
                stream.unsent.put_draining(reason)
                stream.wake()
            self._note_drained()

    async def drained(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
                while any(not stream.is_flushed for stream in self._streams):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        self._dispatcher.check(self._streams)

    # the wire's side

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Handlers take raw bytes: a malformed frame then ends with a clean status."""
        infer = {"Connect": grpc.stream_stream_rpc_method_handler(self._connect)}
        control = {
            "Drain": grpc.unary_unary_rpc_method_handler(self._control_drain),
            "Snapshot": grpc.unary_unary_rpc_method_handler(self._control_snapshot),
        }
        return (grpc.method_handlers_generic_handler(INFER, infer), grpc.method_handlers_generic_handler(CONTROL, control))

    async def _connect(self, _requests: object, context: Any) -> None:
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
            self._log_wrong_token()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the engine's token is missing or wrong")

    def _log_wrong_token(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._wrong_token_due_s:
            self._wrong_token_due_s = now + REPEAT_S
            log.warning("refused a call: the engine's token is missing or wrong in it")

    async def _greet(self, stream: GatewayStream) -> None:
        hello = await stream.read_hello()
        check_protocol(hello.protocol_version, "the gateway")  # first: the fields of another version may mean something else
        check_known_fields("hello", hello)
        check_model(self._engine.info, Expectation(digests=dict(hello.digests), vocab_size=hello.vocab_size))
        self._streams.append(stream)  # before the hello is written, so that changes meanwhile wait in `unsent` and follow it
        await stream.send(pb.EngineFrame(hello=self.hello))
        self._report_and_wake()
        if self._dispatcher.draining is not None:
            stream.unsent.put_draining(self._dispatcher.draining)
            stream.wake()

    def _hang_up(self, stream: GatewayStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
        self._dispatcher.cancel_all(stream)
        self._note_drained()

    def _take_command(self, stream: GatewayStream, command: pb.Command) -> None:
        self._dispatcher.take(stream, command)
        self._note_drained()

    # the engine's side

    def _deliver(self, updates: Updates) -> None:
        self._dispatcher.deliver(updates)
        self._report_and_wake()
        self._note_drained()

    def _report_and_wake(self) -> LoadSnapshot:
        load = self._engine.snapshot()
        for stream in self._streams:
            stream.unsent.put_load(load, stream.num_submits, stream.last_ping)
            stream.wake()
        return load

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        logged, logged_at = self._engine.snapshot().counters, clock()
        while True:
            counters = self._report_and_wake().counters
            if (seconds := clock() - logged_at) >= LOG_INTERVAL_S:
                if counters.drafts > logged.drafts:
                    log.info("drafts: %s", describe_acceptance(logged, counters, seconds))
                logged, logged_at = counters, clock()
            self.announce()
            for stream in self._streams:
                stream.check_lease(HEARTBEAT_S, self._lease_s, self._max_unread)
            await asyncio.sleep(HEARTBEAT_S)

    def report(self) -> None:
        """At once what the next heartbeat would say."""
        self._report_and_wake()
        self.announce()

    def announce(self) -> None:
        """Send every gateway what has changed since the last call: the weights' digest, the adapters."""
        info, before = self._engine.info, self._announced
        if info is before:
            return
        self._announced = info
        self.hello.model.CopyFrom(encode_model_info(info))
        digest = info.numerics.get(WEIGHTS, "")
        for stream in self._streams:
            if digest != before.numerics.get(WEIGHTS, ""):
                stream.unsent.put_weights_digest(digest)
            if info.adapters != before.adapters:
                stream.unsent.put_adapters(info.adapters)
            stream.wake()

    def _note_drained(self) -> None:
        if self._dispatcher.draining is not None and not self.num_open:
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
            load=encode_load(self._report_and_wake()),
            draining=self._dispatcher.draining is not None,
            num_streams=len(self._streams),
            num_open=self.num_open,
        )
        return reply.SerializeToString()

    async def _read_control(self, kind: type[Asked], data: bytes, context: Any) -> Asked:
        await self._authorize(context)
        try:
            asked = kind.FromString(data)
            check_known_fields(kind.DESCRIPTOR.name, asked)
        except (DecodeError, MalformedFrame) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return asked


def describe_acceptance(before: EngineCounters, after: EngineCounters, seconds: float) -> str:
    """What vLLM's line says of speculation: the figures between two states of the counters, some drafts apart."""
    num_rows, num_drafted = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    num_accepted = after.accepted_tokens - before.accepted_tokens
    places = map(str, range(len(after.accepted_per_position)))
    by_place = [after.accepted_per_position[place] - before.accepted_per_position.get(place, 0) for place in places]
    return (
        f"mean acceptance length {1 + num_accepted / num_rows:.2f}, "
        f"accepted {num_accepted / seconds:.1f} of {num_drafted / seconds:.1f} drafted tokens/s ({num_accepted} of {num_drafted}), "
        f"acceptance by position {' '.join(f'{count / num_rows:.3f}' for count in by_place) or 'none'}, "
        f"on average {num_accepted / num_drafted:.1%}"
    )
