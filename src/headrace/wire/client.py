"""Connects a gateway to one replica: `ReplicaClient` keeps the connection and gives every open request a stream of its updates.

ReplicaClient reconnects with back-off until it is closed, and keeps the replica's last hello and load.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable, counted
from headrace.core.ids import RequestId
from headrace.core.load import LoadSnapshot
from headrace.core.model_info import ModelInfo, Numerics
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.update import FinishReason
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import decode_model_info
from headrace.wire.dial import Dialer
from headrace.wire.service import NOT_READING_AFTER_S, SILENT_AFTER_S, Expectation, Handle, check_model, check_protocol
from headrace.wire.session import NotListening, Session
from headrace.wire.stream import NO_NUMERICS, ReplicaStream
from headrace.wire.target import parse_target
from headrace.wire.tls.files import TlsFiles

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0


class ConnectionState(StrEnum):
    DOWN = "down"
    CONNECTED = "connected"
    DRAINING = "draining"
    SILENT = "silent"
    """Connected, but heartbeats are missing: it is sent nothing new."""
    NOT_READING = "not reading"
    """Connected and heard, but it does not read what is sent."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """instance_id   drawn at each start of the engine process: a restarted replica keeps its name and has lost its requests
    connected_at  on the client's clock
    """

    instance_id: str
    replica: str
    model: ModelInfo
    connected_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class SeenLoad:
    load: LoadSnapshot
    received_s: float


class ReplicaClient:
    def __init__(
        self,
        target: str,
        *,
        name: str = "",
        token: str | None = None,
        tls: TlsFiles | None = None,
        tls_name: str = "",
        expect: Expectation | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """target    "unix:/path", or "host:port": then with a token, and beyond loopback with tls
        tls_name  as of `GrpcTarget`
        clock     that requests' deadlines refer to, in seconds

        Raises ConfigError for a target the wire refuses, or certificates that cannot be used.
        """
        self._dialer = Dialer(replace(parse_target(target, token, tls), tls_name=tls_name))
        self.name = name or target
        self.reason = "not connected yet"
        self.has_tried = False
        self._expect = expect or Expectation()
        self._clock = clock
        self._session: Session | None = None
        self._streams: dict[RequestId, ReplicaStream] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._logged_reasons: set[str] = set()
        self._logged_state: ConnectionState | None = None
        self.info: ReplicaInfo | None = None
        self.snapshot: SeenLoad | None = None

    async def __aenter__(self) -> ReplicaClient:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_connected(), name=f"replica {self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def state(self) -> ConnectionState:
        session = self._session
        if session is None or not session.is_open:
            return ConnectionState.DOWN
        if session.silent_s > SILENT_AFTER_S:
            return ConnectionState.SILENT
        if session.is_draining:
            return ConnectionState.DRAINING
        return ConnectionState.NOT_READING if session.unread_s >= NOT_READING_AFTER_S else ConnectionState.CONNECTED

    @property
    def silent_s(self) -> float:
        """Less the delays of this process; 0 while there is no connection."""
        return self._session.silent_s if self._session is not None and self._session.is_open else 0.0

    @property
    def unread_s(self) -> float:
        return self._session.unread_s if self._session is not None and self._session.is_open else 0.0

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def unseen_handles(self) -> frozenset[Handle]:
        """The handles of requests that no load snapshot has counted: the engine may never read them."""
        return frozenset(self._session.unseen_handles) if self._session is not None else frozenset()

    def sent_since_snapshot(self, lowest: PriorityClass = PriorityClass.BATCH) -> list[int]:
        """Tokens to compute of each request that the last load snapshot does not count, of class `lowest` or a higher one."""
        return self._session.unseen_tokens_of(lowest) if self._session else []

    async def wait_connected(self, timeout_s: float) -> ReplicaInfo:
        """Raises Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.info is None or self.state is ConnectionState.DOWN:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"replica {self.name} is down: {self.reason}") from None
        return self.info

    def submit(self, request: EngineRequest) -> ReplicaStream:
        """Raises: Unavailable when the replica takes no work now, InvalidRequest for what the wire cannot carry or an id already open."""
        state = self.state
        if self._session is None or state is not ConnectionState.CONNECTED:
            why = self.reason if state is ConnectionState.DOWN else "takes no new work"
            raise Unavailable(f"replica {self.name} is {state.value}: {why}")
        if request.request_id in self._streams:
            raise InvalidRequest("request_id", "an id that is not open on this replica", request.request_id)
        handle = self._session.send_submit(request)
        stream = ReplicaStream(
            request,
            handle,
            on_end=self._ended,
            cancel_request=self.cancel,
            request_delivery=self._session.deliveries.add,
            numerics=self._numerics,
        )
        self._streams[request.request_id] = stream
        self._session.streams[handle] = stream
        return stream

    def cancel(self, request_id: RequestId) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            if self._session is not None:
                self._session.send_cancel(stream.handle)
            stream.end()

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            if self._session is not None:
                self._session.send_finish(stream.handle, index, keep_tokens, reason)
            stream.end_sequence(index)

    @property
    def open_streams(self) -> Iterable[ReplicaStream]:
        """In the order in which they were sent."""
        return self._streams.values()

    def abandon(self, error_of: Callable[[], Unavailable], may_move: Callable[[ReplicaStream], bool]) -> int:
        """Each open stream that may move raises such an error, and the engine is sent a cancel. Returns how many."""
        moved = [stream for stream in self._streams.values() if may_move(stream)]
        for stream in moved:
            if self._session is not None:
                self._session.send_cancel(stream.handle)
            stream.fail(error_of())
        return len(moved)

    def _ended(self, stream: ReplicaStream) -> None:
        self._streams.pop(stream.request_id, None)
        if self._session is not None:
            self._session.streams.pop(stream.handle, None)

    async def _keep_connected(self) -> None:
        retry_s = FIRST_RETRY_S
        try:
            while True:
                session = Session(
                    self._dialer,
                    self._expect,
                    on_hello=self._take_hello,
                    on_load=self._take_load,
                    on_weights_digest=self._take_weights_digest,
                    on_adapters=self._take_adapters,
                    on_beat=self._log_state,
                    clock=self._clock,
                )
                self._session = session
                is_starting = False
                try:
                    await session.run()
                except HeadraceError as error:
                    self.reason = str(error)
                    is_starting = isinstance(error, NotListening) and self._logged_state is None
                except Exception as error:  # the outermost loop: a bug of ours must not leave the replica down for ever
                    log.exception("replica %s: the connection failed", self.name)
                    self.reason = f"{type(error).__name__}: {error}"
                self._log_down(is_starting=is_starting)
                retry_s = FIRST_RETRY_S if self.info is not None else min(LAST_RETRY_S, 2 * retry_s)
                self._lose()
                await asyncio.sleep(retry_s * random.uniform(0.8, 1.2))
        finally:
            self.reason = "closed"
            self._lose()

    def _take_hello(self, hello: pb.EngineHello) -> None:
        check_protocol(hello.protocol_version, "the engine")
        model = decode_model_info(hello.model)
        check_model(model, self._expect)
        self.info = ReplicaInfo(hello.instance_id, hello.replica, model, self._clock())
        self._changed.set()
        self._logged_reasons.clear()
        self._logged_state = ConnectionState.CONNECTED
        log.info("replica %s is connected (instance %s)", self.name, hello.instance_id)

    def _log_state(self) -> None:
        state = self.state
        if state is not self._logged_state:
            self._logged_state = state
            is_bad = state in (ConnectionState.SILENT, ConnectionState.NOT_READING)
            log.log(logging.WARNING if is_bad else logging.INFO, "replica %s is %s", self.name, state.value)

    def _log_down(self, *, is_starting: bool) -> None:
        reason = "" if is_starting else self.reason
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            if is_starting:
                log.info("waiting for replica %s to start", self.name)
            else:
                log.warning("replica %s is down: %s", self.name, reason)

    def _take_weights_digest(self, digest: str) -> None:
        if self.info is not None:
            self.info = replace(self.info, model=self.info.model.with_weights_digest(digest))
            for stream in self._streams.values():
                stream.numerics = self._numerics

    def _take_adapters(self, adapters: Mapping[str, str]) -> None:
        if self.info is not None:
            self.info = replace(self.info, model=self.info.model.with_adapters(adapters))
            log.info("replica %s has %s", self.name, counted(len(adapters), "adapter"))

    @property
    def _numerics(self) -> Numerics:
        return self.info.model.numerics if self.info is not None else NO_NUMERICS

    def _take_load(self, load: LoadSnapshot) -> None:
        self.snapshot = SeenLoad(load, self._clock())
        self.has_tried = True

    def _lose(self) -> None:
        """Neither hello nor load is carried over: the next connection may lead to another process."""
        self._session, self.info, self.snapshot, self.has_tried = None, None, None, True
        for stream in list(self._streams.values()):
            stream.fail(Unavailable(f"replica {self.name} was lost while it worked on this request ({self.reason}); it can be sent again"))
