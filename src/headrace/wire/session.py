"""Runs one connection of a ReplicaClient from dial to loss: hellos, reading, writing commands, and a watch that ends it after LEASE_S of
silence.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, RequestTooLarge
from headrace.core.load import LoadSnapshot
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.tasks import end_tasks
from headrace.core.update import FinishReason
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import decode_adapters, decode_load, decode_rejected, encode_cancel, encode_finish, encode_submit
from headrace.wire.codec.fields import PRIORITY_CLASS
from headrace.wire.codec.request import set_remaining
from headrace.wire.codec.update import UpdateRows, update_of
from headrace.wire.dial import Dialer
from headrace.wire.service import CONNECT, HEARTBEAT_S, LEASE_S, PROTOCOL_VERSION, READ_TOKENS_PER_S, Expectation, Handle, MalformedFrame
from headrace.wire.stream import SLICE_S, DeliveryQueue, ReplicaStream
from headrace.wire.target import nothing_listens

MAX_FRAME_BYTES = 2**20
MAX_SUBMIT_BYTES = 8 * MAX_FRAME_BYTES


@dataclass(slots=True)
class _Submit:
    command: pb.Command
    num_bytes: int
    num_tokens: int
    priority: PriorityClass
    deadline_at: float | None
    finishes: list[pb.Command] = field(default_factory=list)


class UnwrittenCommands:
    """Packs commands into frames, cancels and finishes first: until they arrive the engine goes on computing what they end."""

    def __init__(self) -> None:
        self._urgent: deque[pb.Command] = deque()
        self._submits: dict[Handle, _Submit] = {}
        self.num_prefill_tokens = 0

    def tokens_of(self, lowest: PriorityClass) -> list[int]:
        return [waiting.num_tokens for waiting in self._submits.values() if waiting.priority <= lowest]

    @property
    def handles(self) -> list[Handle]:
        return list(self._submits)

    def __bool__(self) -> bool:
        return bool(self._urgent or self._submits)

    def submit(self, request: EngineRequest, handle: Handle) -> None:
        """Raises InvalidRequest or RequestTooLarge for a request that the wire cannot carry."""
        command = encode_submit(request, handle)
        num_bytes = command.ByteSize()
        if num_bytes > MAX_SUBMIT_BYTES:
            raise RequestTooLarge("prompt", f"at most {MAX_SUBMIT_BYTES} bytes on the wire", num_bytes, "Shorten the prompt.")
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self._submits[handle] = _Submit(command, num_bytes, num_tokens, request.priority, request.deadline_at)
        self.num_prefill_tokens += num_tokens

    def cancel(self, handle: Handle) -> None:
        waiting = self._submits.pop(handle, None)
        if waiting is None:
            self._urgent.append(encode_cancel(handle))
        else:
            self.num_prefill_tokens -= waiting.num_tokens

    def finish(self, handle: Handle, index: int, keep_tokens: int, reason: FinishReason) -> None:
        command = encode_finish(handle, index, keep_tokens, reason)
        waiting = self._submits.get(handle)
        (self._urgent if waiting is None else waiting.finishes).append(command)

    def take(self, now: float) -> pb.ClientFrame:
        """Deadlines are the time that remains at `now`."""
        frame, num_bytes = pb.ClientFrame(), 0
        while self._urgent and num_bytes < MAX_FRAME_BYTES:
            num_bytes += self._urgent[0].ByteSize()
            frame.commands.append(self._urgent.popleft())
        while self._submits:
            handle, waiting = next(iter(self._submits.items()))
            if num_bytes and num_bytes + waiting.num_bytes > MAX_FRAME_BYTES:
                break
            del self._submits[handle]
            self.num_prefill_tokens -= waiting.num_tokens
            set_remaining(waiting.command.submit, waiting.deadline_at, now)
            frame.commands.extend((waiting.command, *waiting.finishes))
            num_bytes += waiting.num_bytes
        return frame


HELLO_TIMEOUT_S = 5.0
CLOCK_ROWS = 64


class ConnectionLost(HeadraceError):
    pass


class NotListening(ConnectionLost):
    """The engine has not started yet, or has ended."""


class Session:
    """Owns a gRPC channel while `run` runs."""

    def __init__(
        self,
        dialer: Dialer,
        expect: Expectation,
        *,
        on_hello: Callable[[pb.EngineHello], None],
        on_load: Callable[[LoadSnapshot], None],
        on_weights_digest: Callable[[str], None],
        on_adapters: Callable[[Mapping[str, str]], None],
        on_beat: Callable[[], None],
        clock: Clock,
    ) -> None:
        """on_hello: may raise Mismatch, which ends the session"""
        self._dialer = dialer
        self._expect = expect
        self._on_hello = on_hello
        self._on_load = on_load
        self._on_weights_digest = on_weights_digest
        self._on_adapters = on_adapters
        self._on_beat = on_beat
        self._clock = clock
        self._commands = UnwrittenCommands()
        self._has_commands = asyncio.Event()
        self._next_handle = 1
        self._unseen: deque[tuple[Handle, int, PriorityClass]] = deque()  # with the number of tokens whose KV it has to compute
        self._num_submits_seen = 0
        self._num_pings = self._num_pings_written = self._num_pings_seen = 0
        self._num_seen_at_beat = self._num_unread_beats = 0
        self.streams: dict[Handle, ReplicaStream] = {}
        self.deliveries = DeliveryQueue(clock)
        self.is_open = False
        self.is_draining = False
        self.last_frame_at = clock()
        self._watch_due_at = math.inf

    @property
    def num_unseen_tokens(self) -> int:
        return sum([num_tokens for _, num_tokens, _ in self._unseen]) + self._commands.num_prefill_tokens

    def unseen_tokens_of(self, lowest: PriorityClass) -> list[int]:
        written = [num_tokens for _, num_tokens, priority in self._unseen if priority <= lowest]
        return written + self._commands.tokens_of(lowest)

    @property
    def unseen_handles(self) -> list[Handle]:
        return [*(handle for handle, _, _ in self._unseen), *self._commands.handles]

    def send_submit(self, request: EngineRequest) -> Handle:
        """Raises InvalidRequest for a request that the wire cannot carry."""
        handle = Handle(self._next_handle)
        self._commands.submit(request, handle)
        self._next_handle += 1
        self._has_commands.set()
        return handle

    def send_cancel(self, handle: Handle) -> None:
        self._commands.cancel(handle)
        self._has_commands.set()

    def send_finish(self, handle: Handle, index: int, keep_tokens: int, reason: FinishReason) -> None:
        self._commands.finish(handle, index, keep_tokens, reason)
        self._has_commands.set()

    async def run(self) -> None:
        """Always raises: ConnectionLost, Mismatch or MalformedFrame."""
        channel = self._dialer.open_channel()
        try:
            connect = channel.stream_stream(CONNECT, request_serializer=pb.ClientFrame.SerializeToString)
            call = connect(metadata=self._dialer.metadata)
            await self._pump(call)
        except grpc.aio.AioRpcError as error:
            raise await self._lost(error.code(), error.details()) from error
        except (grpc.aio.BaseError, asyncio.InvalidStateError, OSError) as error:
            # InvalidStateError is what gRPC says of a write to a call that has just ended.
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        finally:
            self.is_open = False
            await channel.close()

    async def _pump(self, call: Any) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._greet(call)
        except TimeoutError:
            raise ConnectionLost(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        pumps = [asyncio.create_task(pump) for pump in (self._write(call), self._read(call), self.deliveries.run(), self._watch())]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            # gRPC cancels a pump when its call has ended on this side; nothing else does before `finally`.
            for task in done:
                if not task.cancelled():
                    task.result()
            raise ConnectionLost("the call was cancelled" if any(task.cancelled() for task in done) else "the engine closed the stream")
        finally:
            await end_tasks(pumps)
            self.deliveries.deliver_all()

    async def _greet(self, call: Any) -> None:
        hello = pb.ClientHello(
            protocol_version=PROTOCOL_VERSION, client="gateway", digests=dict(self._expect.digests), vocab_size=self._expect.vocab_size
        )
        await call.write(pb.ClientFrame(hello=hello))
        frame = await self._next_frame(call)
        if frame is None or not frame.HasField("hello"):
            raise MalformedFrame("the engine's first frame is not a hello")
        self.is_open = True
        self._on_hello(frame.hello)
        await self._take(frame)

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands or self._num_pings > self._num_pings_written:
                frame = self._commands.take(self._clock())
                submits = (command.submit for command in frame.commands if command.HasField("submit"))
                self._unseen.extend(_unseen_of(submit) for submit in submits)
                if self._num_pings > self._num_pings_written:
                    frame.ping = self._num_pings_written = self._num_pings
                await call.write(frame)

    async def _read(self, call: Any) -> None:
        while (frame := await self._next_frame(call)) is not None:
            await self._take(frame)

    async def _next_frame(self, call: Any) -> pb.EngineFrame | None:
        data = await call.read()
        if data is grpc.aio.EOF:
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise await self._lost(code, await call.details())
            return None
        try:
            return pb.EngineFrame.FromString(data)
        except DecodeError as error:
            raise MalformedFrame("a frame of the engine does not parse") from error

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last frame, less the delays of this process's event loop."""
        return min(self._clock(), self._watch_due_at) - self.last_frame_at

    @property
    def unread_s(self) -> float:
        """HEARTBEAT_S for each of this end's beats since the engine last counted one, less the time for large prompts in transit."""
        if self._num_pings_seen >= self._num_pings:
            return 0.0
        return max(0.0, self._num_unread_beats * HEARTBEAT_S - self.num_unseen_tokens / READ_TOKENS_PER_S)

    async def _watch(self) -> None:
        while self.silent_s < LEASE_S:
            self._watch_due_at = self._clock() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            now = self._clock()
            self.last_frame_at = min(now, self.last_frame_at + max(0.0, now - self._watch_due_at))
            if self.unread_s > LEASE_S:
                raise ConnectionLost(f"the engine has read nothing for {LEASE_S:g} s")
            has_read = self._num_pings_seen == self._num_pings or self._num_pings_seen > self._num_seen_at_beat
            self._num_unread_beats = 1 if has_read else self._num_unread_beats + 1
            self._num_seen_at_beat = self._num_pings_seen
            self._num_pings += 1
            self._has_commands.set()
            self._on_beat()
        raise ConnectionLost(f"no heartbeat for {LEASE_S:g} s")

    async def _take(self, frame: pb.EngineFrame) -> None:
        self.last_frame_at = self._clock()
        if frame.HasField("draining"):
            self.is_draining = True
        if frame.weights_digest:
            self._on_weights_digest(frame.weights_digest)
        if frame.HasField("adapters"):
            self._on_adapters(decode_adapters(frame.adapters.digests))
        if frame.HasField("updates"):
            await self._take_rows(UpdateRows(frame.updates, takes_prompt=self._takes_prompt))
        for rejected in frame.rejected:
            handle, error = decode_rejected(rejected)
            if (stream := self.streams.get(handle)) is not None:
                stream.reject(error)
        if frame.HasField("load"):
            self._see(frame.submits_seen)
            self._num_pings_seen = frame.pings_seen
            self._on_load(decode_load(frame.load))

    async def _take_rows(self, rows: UpdateRows) -> None:
        streams, ends_s = self.streams, self._clock() + SLICE_S
        for number, (handle, index, token_ids, extras) in enumerate(rows):
            if (stream := streams.get(handle)) is None:
                continue
            if extras is None:
                stream.put_plain_row(index, token_ids)
            else:
                stream.put(update_of(stream.attempt, index, token_ids, extras))
            if number % CLOCK_ROWS == 0 and self._clock() > ends_s:
                await asyncio.sleep(0)
                ends_s = self._clock() + SLICE_S

    def _takes_prompt(self, handle: Handle, index: int) -> bool:
        stream = self.streams.get(handle)
        return stream is not None and stream.first_index == index

    def _see(self, submits_seen: int) -> None:
        while self._num_submits_seen < submits_seen and self._unseen:
            self._num_submits_seen += 1
            self._unseen.popleft()

    async def _lost(self, code: grpc.StatusCode, details: str | None) -> ConnectionLost:
        if code is not grpc.StatusCode.UNAVAILABLE or self.is_open:
            return ConnectionLost(f"{code.name.lower()}: {details}")
        if await nothing_listens(self._dialer.target):
            return NotListening(f"{code.name.lower()}: {details}")
        return ConnectionLost(await self._dialer.find_tls_fault() or f"{code.name.lower()}: {details}")


def _unseen_of(submit: pb.Submit) -> tuple[Handle, int, PriorityClass]:
    return Handle(submit.handle), len(submit.prompt_ids) + len(submit.output_ids), PRIORITY_CLASS[submit.priority]
