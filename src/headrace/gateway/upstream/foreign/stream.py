"""Streams the answer to one request from a model's foreign servers."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, Overloaded, Unavailable
from headrace.gateway.upstream.foreign.attempt import BROKE, BUSY, NOT_NOW, AttemptFailed, AttemptResult, ForeignRequest
from headrace.gateway.upstream.foreign.chunk import MAX_SUM
from headrace.gateway.upstream.foreign.events import END_OF_BODY_S, LATE_USAGE_S, EventReader
from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.seam import NO_USAGE, EventListener, EventStream, OutputEvent, SequenceFacts, TokenUsage, added, merged
from headrace.observe.finished_request import AnswerAttempt, AnswerHandling, Compared
from headrace.observe.timeline import Span
from headrace.policy.routing.choice import LEAST_BUSY, ONLY, Random, cheaper_of_two
from headrace.policy.routing.failures import RetryBudget

log = logging.getLogger("headrace.gateway")

MAX_UNREAD_BYTES = 64 << 10

EVENT_BYTES = 256

MAX_ATTEMPTS = 3
"""Or as many as the model has servers where these are more."""

BACKOFF_S = 0.1
"""Doubled with every attempt, and up to a quarter is added at random."""

MAX_RETRY_WAIT_S = 2.0
"""Beyond it the client is asked to wait instead, by Retry-After."""

CAN_PASS = (AttemptResult.CONNECT, AttemptResult.SERVER_ERROR, AttemptResult.RATE_LIMITED)


FIRST_IN_ORDER = "the first, by its order, of those that can take it now"


class ForeignRoute:
    """places       the servers that may answer, each with its place in the request's own order
    keeps_first  no other server is asked after the first
    reason, compared  of the last choice, as `AnswerAttempt` has them
    """

    def __init__(
        self,
        places: Mapping[ForeignServer, int],
        *,
        max_tokens: int | None,
        keeps_first: bool,
        budget: RetryBudget,
        clock: Clock,
        random: Random,
    ) -> None:
        self.tried: dict[ForeignServer, AttemptResult] = {}
        self._places, self._keeps_first = places, keeps_first
        self._servers = list(places)
        self._max_tokens = max_tokens
        self._budget = budget
        self._clock = clock
        self.reason = ""
        self.compared: tuple[Compared, ...] = ()
        self._random = random
        self._num_attempts = 0
        budget.deposit()

    def pick(self) -> ForeignServer:
        """Raises Overloaded or Unavailable where none takes the request now."""
        now = self._clock()
        able = [server for server in self._servers if server.can_take(now)]
        left = [server for server in able if server not in self.tried]
        left = left or [server for server in able if self.tried[server] in CAN_PASS]
        if not left:
            raise self._refusal(now)
        self.reason, self.compared = ONLY, ()
        if len(left) == 1:
            return left[0]
        fit = [server for server in left if self._fits(server)] or left
        reachable = [server for server in fit if server.is_reachable] or fit
        order = min(map(self._order, reachable))
        first = [server for server in reachable if self._order(server) == order]
        self.reason = FIRST_IN_ORDER if len(first) == 1 else LEAST_BUSY
        self.compared = tuple([Compared(server.name, False, server.outstanding(now), None) for server in first])
        return cheaper_of_two(first, lambda server: server.outstanding(now), self._random)

    def pause_s(self, server: ForeignServer, failure: AttemptFailed) -> float:
        """Raises the failure's error if there is no next attempt."""
        self.tried[server] = failure.result
        self._num_attempts += 1
        if self._keeps_first:
            self._servers = [server]
        if failure.result is AttemptResult.OVERFLOW:
            self._servers = [each for each in self._servers if (each.max_model_len or 0) > (server.max_model_len or 0)]
        is_final = failure.has_begun or failure.result is AttemptResult.INVALID or not self._servers
        if is_final or self._num_attempts >= max(MAX_ATTEMPTS, len(self._servers)):
            raise failure.error
        now = self._clock()
        if any(each.can_take(now) and each not in self.tried for each in self._servers):
            return 0.0
        waits = [each.wait_s(now) for each in self._servers if each.has_room and self.tried.get(each) in CAN_PASS]
        pause_s = max(min(waits, default=0.0), BACKOFF_S * 2.0 ** (self._num_attempts - 1))
        if not waits or pause_s > MAX_RETRY_WAIT_S or not self._budget.withdraw():
            raise failure.error
        return pause_s * (1.0 + self._random.randrange(256) / 1024)

    def _order(self, server: ForeignServer) -> tuple[int, int]:
        return self._places[server], server.config.order

    def _fits(self, server: ForeignServer) -> bool:
        return server.max_model_len is None or (self._max_tokens or 0) < server.max_model_len

    def _refusal(self, now: float) -> HeadraceError:
        wait_s = max(1.0, min(server.wait_s(now) for server in self._servers))
        if not all(server.is_out for server in self._servers):
            return Overloaded(BUSY, retry_after_s=wait_s)
        return Unavailable(NOT_NOW, retry_after_s=wait_s)


class HttpStream(EventStream):
    """A task of its own reads, so that `cancel` ends it wherever it waits."""

    unread_bytes = 0

    def __init__(self, model: str, request: ForeignRequest, new_route: Callable[[], ForeignRoute], clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._request = request
        self._new_route = new_route
        self._used = NO_USAGE
        self._reader: EventReader | None = None
        self._asked: Sequence[int] = ()
        self._server: ForeignServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: EventListener | None = None
        self._unread: list[OutputEvent] = []
        self._error: HeadraceError | None = None
        self._attempts: list[AnswerAttempt] = []
        self._spans: list[Span] = []
        self._begun_at: float | None = None
        self._is_ended = False
        self._wants_more: asyncio.Future[None] | None = None
        self._wants_room: asyncio.Future[None] | None = None

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
        usage = self._used
        if self._reader is not None:
            counted = self._reader.answer.usage
            num_uncounted = 0 if counted.prompt_tokens else self._request.num_prompts_of(self._asked)
            usage = added(usage, counted._replace(num_uncounted_prompts=num_uncounted))
        return TokenUsage._make([min(count, MAX_SUM) for count in usage])

    def facts(self, index: int) -> SequenceFacts:
        return SequenceFacts(None if self._server is None else self._server.name)

    def handling(self) -> AnswerHandling:
        return AnswerHandling(self._attempts, self._spans)

    def cancel(self) -> None:
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
            for left in self._request.parts():
                while left:
                    left = await self._answer(left)
        except HeadraceError as error:
            self._error = error
        except Exception as error:  # the outermost: whatever went wrong, an answer that broke off must not look complete
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("model %s: reading from its server failed\n%s%s", self._model, place, type(error).__name__)
            self._error = Unavailable(BROKE if self.usage().completion_tokens else NOT_NOW)
        finally:
            self._is_ended = True
            _wake(self._wants_more)

    async def _answer(self, left: Sequence[int]) -> Sequence[int]:
        route = self._new_route()
        while True:
            server = self._server = route.pick()
            asked = self._asked = self._request.share(left, server.refused, takes_one_prompt=server.takes_one_prompt)
            late_usage_s = END_OF_BODY_S if server.sends_usage is False else LATE_USAGE_S
            reader = self._reader = EventReader(asked, self._request.request_id, late_usage_s=late_usage_s)
            try:
                await self._attempt(server, route, asked, reader)
            except AttemptFailed as failure:
                if not reader.has_begun:
                    self._reader = None  # it costs nothing
                await asyncio.sleep(route.pause_s(server, failure))
                continue
            server.sends_usage = server.sends_usage or reader.answer.has_usage
            self._used, self._reader = self.usage(), None
            return [*reader.answer.left, *left[len(asked) :]]

    async def _attempt(self, server: ForeignServer, route: ForeignRoute, asked: Sequence[int], reader: EventReader) -> None:
        """Raises AttemptFailed."""
        sent_at, result, self._begun_at = self._clock(), AttemptResult.ABANDONED, None
        try:
            await server.attempt(self._request, asked, reader, self, counts=server not in route.tried)
            result = AttemptResult.OK
        except AttemptFailed as failure:
            result = failure.result
            raise
        finally:
            ended_at = self._clock()
            begun_at = ended_at if self._begun_at is None else self._begun_at
            if self._spans:
                self._spans.append(Span("route", self._spans[-1].end, sent_at))
            self._spans += [Span("wait", sent_at, begun_at), Span("stream", begun_at, ended_at)]
            attempt = AnswerAttempt(
                server.name, sent_at, ended_at - sent_at, route.reason, route.compared, result, num_sequences=len(asked)
            )
            self._attempts.append(attempt)

    # -- what the reader gives its events to (`events.EventSink`) --------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return self.unread_bytes <= MAX_UNREAD_BYTES

    async def wait_for_room(self) -> None:
        while not self.has_room:
            self._wants_room = asyncio.get_running_loop().create_future()
            await self._wants_room

    def take(self, events: Sequence[OutputEvent]) -> None:
        if self._begun_at is None:
            self._begun_at = self._clock()
        self._unread += events
        self.unread_bytes += sum([EVENT_BYTES + event.num_bytes for event in events])
        if self._listener is not None and self._can_be_taken(self._listener):
            self._listener.take(self._taken())
        else:
            _wake(self._wants_more)

    def _can_be_taken(self, listener: EventListener) -> bool:
        if self._wants_more is None or self._wants_more.done() or not listener.has_room:
            return False
        return not any(event.finish is not None or event.logprobs for event in self._unread)

    def _taken(self) -> list[OutputEvent]:
        events = self._unread if len(self._unread) == 1 else merged(self._unread)
        self._unread = []
        self.unread_bytes = 0
        _wake(self._wants_room)
        return events


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
