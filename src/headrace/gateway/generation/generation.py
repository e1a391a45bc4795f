"""One generating request: its parsed body, and the values that stages hand on to later stages."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from headrace.core.errors import DeadlineBeforeStart
from headrace.core.sampling import SamplingParams
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.generation.answer_encoder import AnswerEncoder, EventRecorder
from headrace.gateway.generation.answer_memory import AnswerMemory
from headrace.gateway.generation.event_log import EventLog
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import SseStream
from headrace.gateway.sessions.fitting import Fitted
from headrace.gateway.sessions.history import History
from headrace.gateway.upstream.generation_request import Conversation, EarlierOutput, GenerationRequest, PrincipalFacts
from headrace.gateway.upstream.seam import NO_USAGE, EventStream, OutputEvent, Prepared, TokenUsage
from headrace.policy.admission.unsent import UnsentRequest
from headrace.policy.limits.price import FREE, Price

CallNext = Callable[[], Awaitable[Prepared]]
"""What stands behind a stage: it gives the prepared answer, before its first token."""


def never() -> bool:
    """`Generation.outlives_client` of an answer that ends with its client."""
    return False


class Generation:
    """
    parsed             as the surface read it; a session puts its history before the messages
    history            of the conversation that the prompt is; empty where it is none
    asked, model       the model that was asked for, and the one that answers
    client_params      as the client gave them; the upstream adds the model's defaults
    memory             what the answer takes of `charges`
    answer_id, created  of the answer: the id of the request that began it, and when that was in Unix seconds
    earlier            output of the stream that this request continues
    event_log          numbers a stream's events; None: they have no ids
    preferred_replica, unsent  see `GenerationRequest`
    fitted             how the conversation was shortened; None: it was not
    side_usage         of requests that were answered for this one before it; None: there were none
    is_replayed        the answer is that to an earlier request with the same Idempotency-Key: nothing new happens
    stream             of the answer's events, once it has begun
    used               tokens of the answer, once it is over; None: no engine began it

    Hooks of the stages:

    recorders          get the events of the answer
    replay             writes what the client lacks of the stream that this request continues, before the first new event
    before_end         awaited with the replica's name when all events of the answer are there, before its last bytes are sent; where one
                       raises, the answer ends in that error, and `is_refused_at_end`
    outlives_client    whether the answer is read to its end for others when its client has left
    ends               left at the end of the request, in the reverse order, whatever happened
    """

    def __init__(self, service: Service, exchange: Exchange, charges: RequestCharges, parsed: ParsedRequest) -> None:
        """charges: the memory that this request takes is charged to it.

        Raises: ModelNotFound or InvalidRequest, for everything that can be refused without asking the upstream.
        """
        self.service = service
        self.exchange = exchange
        self.charges = charges
        self.parsed = parsed
        self.history = History(parsed.prompt.messages) if isinstance(parsed.prompt, Conversation) else History()
        self.asked = self.model = service.models.usable_by(exchange.principal).only(parsed.model)
        exchange.use(self.model.users)
        record = exchange.record
        record.model, record.stream, record.n = self.model.name, parsed.is_streaming, parsed.sampling.get("n")
        record.version = self.model.upstream.fingerprint
        self.client_params = SamplingParams(**parsed.sampling).checked()
        parsed.check_caps(exchange.principal.priority)
        self.memory = AnswerMemory(charges, parsed, self.client_params)
        self.reservation = service.limiter.reservation(exchange.request_id)
        self.answer_id = exchange.request_id
        self.created = int(service.unix_time())
        self.earlier: EarlierOutput | None = None
        self.event_log: EventLog | None = None
        self.preferred_replica = ""
        self.unsent: UnsentRequest | None = None
        self.fitted: Fitted | None = None
        self.side_usage: TokenUsage | None = None
        self.is_replayed = False
        self.stream: EventStream | None = None
        self.used: TokenUsage | None = None
        self.recorders: list[EventRecorder] = []
        self.replay: Callable[[EventStream, RequestProgress, AnswerEncoder, SseStream], Awaitable[None]] | None = None
        self.before_end: list[Callable[[str | None], Awaitable[None]]] = []
        self.is_refused_at_end = False
        self.outlives_client: Callable[[], bool] = never
        self.ends = AsyncExitStack()
        self.ends.callback(self._forget_hooks)

    def _forget_hooks(self) -> None:
        """They refer back to this request, whose memory is to be free without a collection."""
        self.recorders.clear()
        self.before_end.clear()
        self.replay, self.outlives_client = None, never

    @property
    def price(self) -> Price:
        """The tokens' price of the model that answers."""
        return self.service.config.prices.get(self.model.name, FREE)

    @property
    def shown_model(self) -> str:
        """The answering model's name for the answer: as the client wrote it, unless another model than that answers."""
        asked = self.parsed.model
        return asked if asked is not None and asked in self.model.names else self.model.name

    @property
    def deadline_at(self) -> float | None:
        """On the service's clock; None: no deadline. Raises DeadlineBeforeStart when it has passed."""
        request_s = self.service.config.timeouts.request_s
        if request_s is None:
            return None
        deadline_at = self.exchange.arrived_at + request_s
        if deadline_at <= self.service.clock():
            raise DeadlineBeforeStart(f"The request's deadline of {request_s:g} s passed before it began.")
        return deadline_at

    def usage(self) -> TokenUsage:
        """What the answer has used, as far as it has come."""
        return NO_USAGE if self.stream is None else self.stream.usage()

    def record_events(self, events: Sequence[OutputEvent]) -> None:
        for recorder in self.recorders:
            recorder.add(events)

    def request(self) -> GenerationRequest:
        """What the upstream is asked. Raises as `deadline_at`."""
        parsed = self.parsed
        return GenerationRequest(
            request_id=self.exchange.request_id,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            grammar=parsed.grammar,
            deadline_at=self.deadline_at,
            has_priority=parsed.has_priority,
            earlier=self.earlier,
            preferred_replica=self.preferred_replica,
            unsent=self.unsent,
        )

    def facts(self) -> PrincipalFacts:
        """What the upstream knows of the caller."""
        principal = self.exchange.principal
        salt = hashlib.blake2b(principal.tenant_key.encode(), digest_size=16, key=self.service.salt_key, person=b"headrace-salt")
        salt.update(b"\0" + self.parsed.cache_salt.encode())
        return PrincipalFacts(
            tenant=principal.tenant,
            priority=self.parsed.priority,
            tier=principal.tier.terms(principal.tier_name),
            salt=salt.digest(),
            ceiling=self.reservation.ceiling(self.price),
        )
