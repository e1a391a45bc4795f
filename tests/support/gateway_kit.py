"""Builds a gateway with in-process replicas: the real application, wire streams and text package; only the socket to the engine
is missing.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx2
import msgspec
import text_kit
from asgi_connection import connected
from local_workers import LocalWorkers
from patience import eventually as eventually
from tls_kit import TlsClient, tls_client
from virtual_time import VirtualTimeLoop

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.plan import TokenLogprobs
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.update import FinishReason, MissReason, SequenceUpdate, StageSeconds
from headrace.gateway.app import Gateway
from headrace.gateway.compose import open_gateway
from headrace.gateway.config import GatewayConfig, config_from
from headrace.gateway.control.models import Sources
from headrace.gateway.control.reload import Reloader
from headrace.gateway.http.asgi import OPENAI
from headrace.gateway.http.config import ConnectionLimit, HttpTls, ServerConfig
from headrace.gateway.http.server import Server
from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.main import follow_connections
from headrace.gateway.text_host import TextContext
from headrace.gateway.text_workers.frames import HostConfig, Workers
from headrace.gateway.upstream.model_config import ModelConfig, ReplicaConfig, text_folders
from headrace.policy.limits.book import Claim
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, ReplicaClient, ReplicaInfo, SeenLoad
from headrace.wire.service import Handle
from headrace.wire.stream import ReplicaStream

https: HttpTls | None = None
"""Set by the fixture `over`: `serving` serves https with this certificate, and `dial` speaks TLS."""

SAID = "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris."
MODEL = "fox"
MAX_MODEL_LEN = 512


def snapshot(**changes: Any) -> LoadSnapshot:
    """An idle replica with 100 free blocks."""
    plain = LoadSnapshot(
        num_running=0,
        num_waiting=0,
        kv_blocks_free=100,
        kv_blocks_cached=0,
        kv_blocks_used=1,
        kv_blocks_total=101,
        counters=EngineCounters(),
    )
    return replace(plain, **changes)


def model_info(text: TextModel, **changes: Any) -> ModelInfo:
    plain = ModelInfo(
        architecture="FakeForCausalLM",
        vocab_size=text.tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(text_kit.eos_token_id(text.tokenizer),),
        kv_groups=(KvGroup(layers=(0,), kv_heads=1, head_dim=8, dtype_bytes=4),),
        block_size=16,
        num_blocks=(101,),
        dtype="float32",
        weight_bytes=1000,
        digests={"model": "0123456789abcdef"},
    )
    return replace(plain, **changes)


def token_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Made-up log-probabilities: the token first, then the ids after it."""
    tops = tuple(token_id + i for i in range(num_top))
    return TokenLogprobs(token_id, -0.25, 1, tops, tuple(-0.25 - i for i in range(num_top)))


@dataclass
class FakeReplica(ReplicaClient):
    """One replica. It says SAID, `updates_at_once` tokens per turn of the event loop, and then its end token.

    hold      set: requests are taken but nothing is said until `go` is set
    on_submit called before anything is said; may reject the stream or raise
    counted   requests that its load snapshot counts
    """

    text: TextModel
    name: str = "r0"
    state: ConnectionState = ConnectionState.CONNECTED
    info: ReplicaInfo | None = None
    snapshot: SeenLoad | None = None
    has_tried: bool = True
    silent_s: float = 0.0
    unread_s: float = 0.0
    sent: dict[PriorityClass, list[int]] = field(default_factory=dict)
    said: str = SAID
    on_submit: Callable[[EngineRequest, ReplicaStream], None] | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[EngineRequest] = field(default_factory=list)
    streams: dict[RequestId, ReplicaStream] = field(default_factory=dict)
    counted: set[RequestId] = field(default_factory=set)
    cancelled: list[RequestId] = field(default_factory=list)
    finished: list[tuple[RequestId, int, int, FinishReason]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    cached_tokens: int = 0
    miss_reason: MissReason | None = None
    token_delay_s: float = 0.0
    updates_at_once: int = 1
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.info = ReplicaInfo(f"instance-{self.name}", self.name, model_info(self.text))
        self.snapshot = SeenLoad(snapshot(), time.monotonic() + 1e6)
        self.go.set()

    @property
    def num_open(self) -> int:
        return len(self.streams)

    @property
    def open_streams(self) -> Collection[ReplicaStream]:
        return self.streams.values()

    @property
    def unseen_handles(self) -> frozenset[Handle]:
        return frozenset(stream.handle for request_id, stream in self.streams.items() if request_id not in self.counted)

    def sent_since_snapshot(self, lowest: PriorityClass = PriorityClass.BATCH) -> list[int]:
        return [num_tokens for priority in PriorityClass if priority <= lowest for num_tokens in self.sent.get(priority, ())]

    def start(self) -> None:
        return

    async def close(self) -> None:
        self.is_closed = True
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def submit(self, request: EngineRequest) -> ReplicaStream:
        if self.state is not ConnectionState.CONNECTED or self.info is None:
            raise Unavailable("secret reason at unix:/run/secret.sock")
        stream = ReplicaStream(
            request,
            Handle(len(self.requests) + 1),
            on_end=self._ended,
            cancel_request=self.cancel,
            request_delivery=ReplicaStream.deliver,
            numerics=self.info.model.numerics,
        )
        self.requests.append(request)
        self.streams[request.request_id] = stream
        try:
            if self.on_submit is not None:
                self.on_submit(request, stream)
        except Exception:
            self._ended(stream)
            raise
        task = asyncio.create_task(self._speak(request, stream))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return stream

    def cancel(self, request_id: RequestId) -> None:
        stream = self.streams.get(request_id)
        if stream is not None:
            self.cancelled.append(request_id)
            stream.end()

    def finish(self, request_id: RequestId, index: int, keep_tokens: int, reason: FinishReason) -> None:
        self.finished.append((request_id, index, keep_tokens, reason))
        if (stream := self.streams.get(request_id)) is not None:
            stream.end_sequence(index)

    def abandon(self, error_of: Callable[[], Unavailable], may_move: Callable[[ReplicaStream], bool]) -> int:
        moved = [(request_id, stream) for request_id, stream in self.streams.items() if may_move(stream)]
        for request_id, stream in moved:
            self.cancelled.append(request_id)
            stream.fail(error_of())
        return len(moved)

    def die(self) -> None:
        self.state, self.info, self.snapshot = ConnectionState.DOWN, None, None
        for stream in list(self.streams.values()):
            stream.fail(Unavailable("replica r0 was lost (unavailable: unix:/run/secret.sock)"))

    def _ended(self, stream: ReplicaStream) -> None:
        self.streams.pop(stream.request_id, None)

    async def _speak(self, request: EngineRequest, stream: ReplicaStream) -> None:
        for number, update in enumerate(self._updates(request)):
            if number % self.updates_at_once == 0:
                await self.go.wait()
                await asyncio.sleep(self.token_delay_s)
            if stream.is_ended:
                return
            say(stream, update)

    def _updates(self, request: EngineRequest) -> Iterator[SequenceUpdate]:
        words = self.text.tokenizer.encode(self.said, add_special_tokens=False)
        eos = text_kit.eos_token_id(self.text.tokenizer)
        params = request.params
        limit = params.max_tokens or MAX_MODEL_LEN - len(request.prompt_ids)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.prompt_logprobs is not None:
            logprobs = tuple(token_logprobs(token_id, params.prompt_logprobs) for token_id in request.prompt_ids[1:])
        begin = len(request.output_ids)
        for position in range(begin, limit):
            token_id = words[position % len(words)] if params.ignore_eos or position < len(words) else eos
            is_end = token_id == eos or token_id in params.stop_token_ids
            is_last = is_end or position + 1 == limit
            for index in request.indices:
                yield SequenceUpdate(
                    request_id=request.request_id,
                    epoch=request.epoch,
                    index=index,
                    token_ids=(token_id,),
                    logprobs=(token_logprobs(token_id, params.logprobs),) if params.logprobs is not None else (),
                    prompt_logprobs=logprobs if position == begin else (),
                    finish=None if not is_last else FinishReason.STOP if is_end else FinishReason.LENGTH,
                    stop_token_id=token_id if is_end else None,
                    num_cached_tokens=self.cached_tokens if position == begin else None,
                    miss_reason=self.miss_reason if position == begin else None,
                    queue_time_s=0.001 if position == begin else None,
                    stages=StageSeconds(0.001, 0.25, 0.5, 0.0, 0.125) if is_last else None,
                )
            if is_end:
                return


def say(stream: ReplicaStream, update: SequenceUpdate) -> None:
    """As the wire's session does: a row of tokens and nothing else is not made into an update unless its reader wants one."""
    if update == SequenceUpdate(request_id=update.request_id, epoch=update.epoch, index=update.index, token_ids=update.token_ids):
        stream.put_plain_row(update.index, update.token_ids)
    else:
        stream.put(update)


def gateway_config(**changes: Any) -> GatewayConfig:
    """One model, one replica, no log, no failover, checked as a file would be. Keys are the file's."""
    data: dict[str, Any] = {
        "models": [{"name": MODEL, "aliases": ["gpt-4o"], "folder": "/nowhere", "replicas": [{"name": "r0", "address": "unix:/nowhere"}]}],
        "port": 0,
        "request_log": "off",
        **changes,
        "timeouts": {"failover_s": 0, **changes.get("timeouts", {})},
    }
    return config_from(data)


def server_config(config: GatewayConfig) -> ServerConfig:
    return config.server if https is None else replace(config.server, tls=https)


def two_replicas() -> list[dict[str, Any]]:
    return some_replicas(2)


def some_replicas(count: int) -> list[dict[str, Any]]:
    replicas = tuple(ReplicaConfig(name=f"r{number}", address="unix:/nowhere") for number in range(count))
    model = ModelConfig(name=MODEL, folder="/nowhere", replicas=replicas)
    made: list[dict[str, Any]] = [msgspec.to_builtins(model)]
    return made


@dataclass
class TestBench:
    """An open gateway, its replicas (the latest connection made under each name), and a client that talks to it without a socket."""

    __test__ = False

    gateway: Gateway
    replicas: dict[str, FakeReplica]
    client: httpx2.AsyncClient
    reloader: Reloader
    label: str = "r0"

    @property
    def replica(self) -> FakeReplica:
        return next(iter(self.replicas.values()))

    async def chat(self, **fields: Any) -> httpx2.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def complete(self, **fields: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", **fields})


@asynccontextmanager
async def open_bench(
    text: TextModel,
    *,
    workers: Workers | None = None,
    sources: Sources | None = None,
    load: Callable[[str], TextModel] | None = None,
    **changes: Any,
) -> AsyncIterator[TestBench]:
    """A bench for a configuration; afterwards nothing may be left over.

    workers  by default text is read in this process
    load     gives the text of folders that a later configuration adds; by default `text`
    """
    config = gateway_config(**changes)
    if sources is None and isinstance(loop := asyncio.get_running_loop(), VirtualTimeLoop):
        sources = Sources(clock=loop.time, unix_time=loop.unix_time)
    replicas: dict[str, FakeReplica] = {}

    def connect(given: ReplicaConfig, text: TextModel, _clock: Clock) -> FakeReplica:
        replicas[given.name] = FakeReplica(text, given.name)
        return replicas[given.name]

    def make_workers(host: HostConfig, _withheld: Collection[str]) -> LocalWorkers:
        return LocalWorkers(TextContext(dict.fromkeys(host.models, text)))

    texts = {model.name: text for model in config.models}
    workers = workers or make_workers(HostConfig(text_folders(config.models)), ())
    async with open_gateway(
        config, texts, workers, connect=connect, load=load or (lambda _folder: text), make_workers=make_workers, sources=sources
    ) as opened:
        gateway = opened.app
        transport = httpx2.ASGITransport(app=connected(gateway))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield TestBench(gateway, replicas, client, opened.reloader)
        assert gateway.service.open_requests.num_open == 0
        assert not gateway.service.pipeline.watch.streams
        gateway.service.text_pool.check()
        opened.reloader.check()
        assert not any(replica.num_open for replica in replicas.values())


@asynccontextmanager
async def serving(gateway: Gateway, reloader: Reloader | None = None, max_connections: int = 1000) -> AsyncIterator[int]:
    """The gateway behind its real HTTP server on a free loopback port, in this event loop. reloader: whose changes the server follows"""
    limit = ConnectionLimit(max_connections, 8)
    server = Server(gateway, server_config(gateway.config), gateway.refused, limit)
    port = await server.start()
    if reloader is not None:
        reloader.follow(partial(follow_connections, server))
    stop = asyncio.Event()
    task = asyncio.create_task(server.serve_until(stop))
    try:
        yield port
    finally:
        stop.set()
        await task


@asynccontextmanager
async def dial(
    port: int, *, limit: int = 64 << 10, sock: socket.socket | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter | TlsClient]]:
    """A connection with small buffers that has shaken hands where the server speaks https, closed for good afterwards.

    sock  one that is connected; by default a new one
    """
    async with dial_tcp(port, limit=limit if https is None else 4096, sock=sock) as (reader, writer):
        if https is None:
            yield reader, writer
            return
        async with tls_client(reader, writer, limit=limit) as client:
            yield client.reader, client


@asynccontextmanager
async def dial_tcp(
    port: int, *, limit: int = 64 << 10, sock: socket.socket | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    loop = asyncio.get_running_loop()
    if sock is not None:
        pass
    elif isinstance(loop, VirtualTimeLoop):
        sock = loop.network.connect(port, receive_bytes=4096)
    else:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def post(path: str, body: dict[str, Any], *more: str) -> bytes:
    data = msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(data)}", *more, "", ""]
    return "\r\n".join(lines).encode() + data


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of every server-sent event but [DONE], which must be last if it is there."""
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line and not line.startswith((":", "id: "))]
    assert "[DONE]" not in datas[:-1]
    return [msgspec.json.decode(data) for data in datas if data != "[DONE]"]


def metric(gateway: Gateway, name: str, **labels: str) -> float:
    """One sample of the metrics page; 0 when it is not there."""
    metrics = gateway.metrics
    values = [registry.get_sample_value(name, labels) for registry in (metrics.registry, metrics.reported)]
    return next((value for value in values if value is not None), 0.0)


def headers(values: Mapping[str, str] | None = None) -> dict[str, str]:
    return {"content-type": "application/json", **(values or {})}


def follow(*opened: TestBench) -> list[UsageRecord]:
    """The records that these gateways write from now on, in the order in which their requests ended."""
    written: list[UsageRecord] = []
    for bench in opened:
        ledger = bench.gateway.service.explanations.ledger
        assert ledger is not None
        ledger.write = written.append  # type: ignore[method-assign,assignment]
    return written


async def used(bench: TestBench, limit: str, key: str) -> int:
    """What counts of a limit of that key's tenant, once everything is charged."""
    limiter = bench.gateway.limiter
    await eventually(lambda: not limiter.num_uncharged)
    principal = await bench.gateway.active.authenticator.principal([(b"authorization", f"Bearer {key}".encode())], OPENAI)
    claims: list[Claim] = [rule.claim(None) for rule in rules_of(principal) if rule.name == limit]
    (reading,) = (await limiter._store.take(None, claims)).readings
    return reading.current
