"""OpenAI-compatible servers behind the seam: chat and completions over HTTP, always streamed from there.

A model has one server or several. `foreign_route` decides which one gets a request and what follows a failure, `foreign_server` is one
attempt at one server, `foreign_watch` asks them for their limits and load. Until the first token of an answer another attempt may follow;
after it a failure is a retryable error at the stream's end: nothing is sent a second time.

Not known here: the number of prompt tokens before the server has reported it, its chat template, its tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest, Unavailable
from headrace.core.request import PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.gateway.http.errors import context_overflow
from headrace.gateway.upstream.foreign_body import foreign_body, most_prompt_tokens
from headrace.gateway.upstream.foreign_chunk import SideField
from headrace.gateway.upstream.foreign_config import ForeignConfig, named
from headrace.gateway.upstream.foreign_events import EventReader
from headrace.gateway.upstream.foreign_route import ForeignRoute
from headrace.gateway.upstream.foreign_server import BROKE, NOT_NOW, AttemptFailed, AttemptResult, ForeignRequest, ForeignServer
from headrace.gateway.upstream.foreign_session import open_session
from headrace.gateway.upstream.foreign_watch import ServerWatch
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import (
    NO_USAGE,
    EventListener,
    OutputEvent,
    Prepared,
    ReplicaHealth,
    SequenceFacts,
    TextPrompt,
    Tokenization,
    TokenUsage,
)
from headrace.observe.upstream_metrics import UpstreamReading
from headrace.policy.admission.joining import JoiningRequests
from headrace.policy.admission.ladder import QueueState
from headrace.policy.limits.ceiling import RequestCeiling
from headrace.policy.routing.choice import Random
from headrace.policy.routing.circuit_breaker import CircuitState
from headrace.policy.routing.retry_budget import RetryBudget

log = logging.getLogger("headrace.gateway")

MAX_UNREAD_BYTES = 64 << 10
"""Bytes read ahead of a slow client; beyond them the server's stream is not read."""

EVENT_BYTES = 256
"""Memory of an event without its content."""

_TOKENIZER = "a model that this server runs itself"


class HttpUpstream:
    """One model and its servers. An `Upstream`."""

    def __init__(self, name: str, servers: Sequence[ForeignServer], *, clock: Clock, random: Random) -> None:
        """name: of the model here, for refusals and the log"""
        self.name = name
        self.servers = tuple(servers)
        self._budget = RetryBudget()
        self._clock = clock
        self._random = random

    @property
    def max_model_len(self) -> int | None:
        """The largest one of its servers, as far as they say."""
        return max((server.max_model_len or 0 for server in self.servers), default=0) or None

    @property
    def fingerprint(self) -> str | None:
        return None

    def queue(self, priority: PriorityClass, joining: JoiningRequests) -> QueueState | None:
        """The shortest queue of a server that takes requests; None unless each of them reports its load, which knows no classes."""
        now = self._clock()
        loads = [server.reported(now) for server in self.servers if not server.reason()]
        known = [load.num_waiting for load in loads if load is not None and load.num_waiting is not None]
        return QueueState(min(known), 0.0) if known and len(known) == len(loads) else None

    @property
    def version(self) -> str:
        return ""

    def replicas(self) -> list[ReplicaHealth]:
        """Its servers. A server counts as connected: connections are made per request."""
        return [
            ReplicaHealth(server.name, is_connected=True, reason=server.reason(), is_foreign=True, num_open=server.num_open)
            for server in self.servers
        ]

    def retired_replicas(self) -> list[ReplicaHealth]:
        return []

    def readings(self) -> Iterator[UpstreamReading]:
        now = self._clock()
        for server in self.servers:
            load = server.reported(now)
            yield UpstreamReading(
                model=self.name,
                replica=server.name,
                attempts={result.value: server.results[result] for result in AttemptResult},
                left_out={field.value: server.left_out[field] for field in SideField},
                num_open=server.num_open,
                is_circuit_open=server.breaker.state is not CircuitState.CLOSED,
                held_s=server.held_s(now),
                num_running=None if load is None else load.num_running,
                num_waiting=None if load is None else load.num_waiting,
            )

    def route(self, max_tokens: int | None) -> ForeignRoute:
        """The attempts of a new request."""
        return ForeignRoute(self.servers, max_tokens=max_tokens, budget=self._budget, clock=self._clock, random=self._random)

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> Prepared:
        max_prompt_tokens = most_prompt_tokens(request.prompt, self.max_model_len)
        request = _within(request, principal.ceiling, max_prompt_tokens)
        params = SamplingParams(**request.sampling).checked()
        prompts = _prompts(request.prompt)
        num_sequences = len(prompts) * params.n
        foreign = ForeignRequest(
            request_id=request.request_id,
            path="chat/completions" if isinstance(request.prompt, Conversation) else "completions",
            fields=foreign_body(request, params),
            salt=principal.salt,
            num_sequences=num_sequences,
            max_tokens=params.max_tokens,
        )
        return Prepared(
            stream=partial(HttpStream, self, foreign),
            prompts=prompts,
            prompt_tokens=None,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=None if params.max_tokens is None else params.max_tokens * num_sequences,
            num_sequences=num_sequences,
            seed=params.seed,
            ignored=["priority"] if request.has_priority else [],  # it is not sent; what else has no effect the server does not say
        )

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")


def _within(request: GenerationRequest, ceiling: RequestCeiling, max_prompt_tokens: int) -> GenerationRequest:
    """The request with a `max_tokens` within the caller's limits, whatever the prompt's tokens turn out to be.

    Raises ContextLengthExceeded where the client's own `max_tokens` leaves no token for a prompt.
    """
    max_tokens, context_tokens = request.sampling.get("max_tokens"), ceiling.context_tokens
    if max_tokens is not None:
        if context_tokens is not None and max_tokens >= context_tokens:
            part = "messages" if isinstance(request.prompt, Conversation) else "prompt"
            error = context_overflow("max_tokens", context_tokens, part=part, prompt_tokens=1, max_tokens=max_tokens, is_least=True)
            raise error.of_tier(ceiling.tier)
        return request
    num_prompts = 1 if isinstance(request.prompt, Conversation) else len(request.prompt.prompts)
    num_sequences = num_prompts * (request.sampling.get("n") or 1)
    bounds = [ceiling.max_tokens(max_prompt_tokens, num_sequences), context_tokens and max(1, context_tokens - 1)]
    given = [bound for bound in bounds if bound is not None]
    return replace(request, sampling={**request.sampling, "max_tokens": min(given)}) if given else request


CHAT_PROMPTS = (TextPrompt(""),)
"""The prompts of every conversation: its messages become text at the server."""


def _prompts(prompt: Conversation | PlainPrompts) -> Sequence[TextPrompt]:
    if isinstance(prompt, Conversation):
        return CHAT_PROMPTS
    return [TextPrompt(given if isinstance(given, str) else "") for given in prompt.prompts]


class HttpStream:
    """One request at the server. An `EventStream`: a task of its own reads, so that cancelling ends it wherever it waits."""

    def __init__(self, upstream: HttpUpstream, request: ForeignRequest) -> None:
        self._upstream = upstream
        self._request = request
        self._reader: EventReader | None = None
        self._server: ForeignServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: EventListener | None = None
        self._unread: dict[int, list[OutputEvent]] = {}
        self.unread_bytes = 0
        self._error: HeadraceError | None = None
        self._is_ended = False
        self._wants_more: asyncio.Future[None] | None = None
        self._wants_room: asyncio.Future[None] | None = None

    @property
    def num_resumes(self) -> int:
        return 0

    async def events(self) -> list[OutputEvent]:
        if self._task is None and not self._is_ended:
            self._task = asyncio.create_task(self._read())
        while not self._unread and not self._is_ended:
            self._wants_more = asyncio.get_running_loop().create_future()
            await self._wants_more
        events = self._taken()
        if not events and self._error is not None:
            raise self._error
        return events

    def listen(self, listener: EventListener | None) -> None:
        self._listener = listener

    def usage(self) -> TokenUsage:
        return NO_USAGE if self._reader is None else self._reader.usage

    def facts(self, index: int) -> SequenceFacts:
        return SequenceFacts(None if self._server is None else self._server.name)

    def saved_state(self) -> None:
        """None: there are no token ids to go on from."""

    def replay(self, index: int, place: int) -> OutputEvent:
        raise AssertionError("a stream that keeps no events is never continued")

    def cancel(self) -> None:
        """The connection is closed, which is how the server hears of it."""
        self._is_ended = True
        self._unread.clear()
        _wake(self._wants_more)
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._task is not None and not self._task.done():
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            await self._deliver()
        except HeadraceError as error:
            self._error = error
        except Exception as error:  # the outermost: whatever went wrong, an answer that broke off must not look complete
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("model %s: reading from its server failed\n%s%s", self._upstream.name, place, type(error).__name__)
            self._error = Unavailable(BROKE if self.usage().completion_tokens else NOT_NOW)
        finally:
            self._is_ended = True
            _wake(self._wants_more)

    async def _deliver(self) -> None:
        """The answer of the first attempt that gives one. Raises the error of the last attempt."""
        route = self._upstream.route(self._request.max_tokens)
        while True:
            server = self._server = route.pick()
            self._reader = EventReader(self._request.num_sequences, self._request.request_id)
            try:
                await server.attempt(self._request, self._reader, self, counts=server not in route.tried)
                return
            except AttemptFailed as failure:
                await asyncio.sleep(route.pause_s(server, failure))

    # -- what the reader gives its events to (`foreign_events.EventSink`) --------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self.unread_bytes <= MAX_UNREAD_BYTES

    async def wait_for_room(self) -> None:
        while not self.has_room:
            self._wants_room = asyncio.get_running_loop().create_future()
            await self._wants_room

    def put(self, events: list[OutputEvent]) -> None:
        for event in events:
            self._unread.setdefault(event.index, []).append(event)
            self.unread_bytes += EVENT_BYTES + event.num_bytes
        if self._listener is not None and self._can_be_taken(self._listener):
            self._listener.take(self._taken())
        else:
            _wake(self._wants_more)

    def _can_be_taken(self, listener: EventListener) -> bool:
        """Whether the listener may have the unread events: the consumer waits, and they are plain."""
        if self._wants_more is None or self._wants_more.done() or not listener.has_room:
            return False
        return not any(event.finish is not None or event.logprobs for events in self._unread.values() for event in events)

    def _taken(self) -> list[OutputEvent]:
        """The unread events, which are read now: one per sequence."""
        events = [OutputEvent.joined(events) for events in self._unread.values()]
        self._unread.clear()
        self.unread_bytes = 0
        _wake(self._wants_room)
        return events


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


@asynccontextmanager
async def open_upstream(
    name: str, configs: Sequence[ForeignConfig], *, clock: Clock, unix_time: Clock, random: Random
) -> AsyncIterator[HttpUpstream]:
    """A model's servers, watched until the block ends. Raises ConfigError where a key is not. None of them needs to be up."""
    async with AsyncExitStack() as stack:
        servers = []
        for server_name, config in named(configs):
            session = await stack.enter_async_context(open_session(config, partial(_log_link_local, name, server_name)))
            servers.append(ForeignServer(name, server_name, config, session, clock=clock, unix_time=unix_time))
        for server in servers:
            watch = ServerWatch(server, reads_load=len(servers) > 1, clock=clock)
            task = asyncio.create_task(watch.run(), name=f"watch over {server.name} of {name}")
            stack.push_async_callback(_stop, task)
        yield HttpUpstream(name, servers, clock=clock, random=random)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _log_link_local(model: str, server: str) -> None:
    reason = "has a link-local address and is not connected to; allow_link_local would allow it"
    log.warning("model %s: its server %s %s", model, server, reason)
