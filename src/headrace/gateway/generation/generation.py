"""The state of one generating request: its parsed body, the values that one stage leaves for later stages, and hooks that stages set.

`surfaces.generating` makes one `Generation` per request, and `generation.run` passes it through the stages (`generation.stages`).
"""

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
"""The next stage, as in a Starlette middleware. Returns the prepared answer, before its first token."""


def never() -> bool:
    """The default of `Generation.outlives_client`: the answer is cancelled when its client disconnects."""
    return False


class Generation:
    """One generating request. The stages read and set the attributes.

    parsed             the request's body, parsed; the session stage puts the session's history before the messages
    history            messages of a chat request; empty for a completion
    asked, model       the model that the client named, and the model that answers
    client_params      sampling parameters of the body; the upstream adds the model's defaults
    memory             the part of `charges` that the answer uses
    answer_id          id of the answer: the id of the request that began the stream
    created            Unix seconds at which the answer was begun
    earlier            output of the stream that this request continues; None: a new answer
    event_log          numbers the events of a resumable stream; None: the events have no ids
    preferred_replica, unsent  see `GenerationRequest`
    fitted             how the conversation was shortened; None: the conversation is unchanged
    side_usage         tokens of other requests that were made for this one, such as a summary; None: no other request
    is_replayed        the answer is a repetition of the answer to an earlier request with the same Idempotency-Key
    stream             the answer's events; None before the answer has begun
    used               tokens of the answer when it has ended; None: no engine began an answer

    Hooks of the stages:

    recorders          each is given the events of the answer
    replay             called before the first new event; sends the events of a continued stream that the client has not received
    before_end         each is awaited with the replica's name after the last event, before the last bytes are sent; when one raises, the
                       answer ends with that error, and `is_refused_at_end` is set
    outlives_client    whether the answer goes on when the client has disconnected, for other requests that wait for the same answer
    ends               exit stack that is closed at the end of the request, also after an error
    """

    def __init__(self, service: Service, exchange: Exchange, charges: RequestCharges, parsed: ParsedRequest) -> None:
        """charges: memory charges of this request.

        Raises ModelNotFound for a model that the key may not use, and InvalidRequest for sampling parameters or sizes out of their limits.
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
        """Drop the hooks, which refer back to this object: without the cycle its memory is freed at once, not by the garbage collector."""
        self.recorders.clear()
        self.before_end.clear()
        self.replay, self.outlives_client = None, never

    @property
    def price(self) -> Price:
        """Token prices of the model that answers; FREE where the configuration has none."""
        return self.service.config.prices.get(self.model.name, FREE)

    @property
    def shown_model(self) -> str:
        """Name of the model in the answer: the name or alias that the client sent, unless another model answers."""
        asked = self.parsed.model
        return asked if asked is not None and asked in self.model.names else self.model.name

    @property
    def deadline_at(self) -> float | None:
        """The request's deadline on the service's clock; None: no deadline. Raises DeadlineBeforeStart when the deadline has passed."""
        request_s = self.service.config.timeouts.request_s
        if request_s is None:
            return None
        deadline_at = self.exchange.arrived_at + request_s
        if deadline_at <= self.service.clock():
            raise DeadlineBeforeStart(f"The request's deadline of {request_s:g} s passed before it began.")
        return deadline_at

    def usage(self) -> TokenUsage:
        """Tokens that the answer has used so far."""
        return NO_USAGE if self.stream is None else self.stream.usage()

    def record_events(self, events: Sequence[OutputEvent]) -> None:
        for recorder in self.recorders:
            recorder.add(events)

    def request(self) -> GenerationRequest:
        """The request for the upstream. Raises DeadlineBeforeStart when the deadline has passed."""
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
            foreign_fields=parsed.foreign_fields,
        )

    def facts(self) -> PrincipalFacts:
        """Facts about the caller for the upstream: tenant, class, tier, cache salt, and the most tokens that the limits allow."""
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
