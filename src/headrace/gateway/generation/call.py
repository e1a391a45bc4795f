"""The values of a generating request: `Call` is what its client wants, `Ready` is the answer that may begin.

`surfaces.endpoint` makes a `Call`, each stage (`generation.stages`) gives it to the next one, and `generation.run` writes the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self

from msgspec import Struct, structs

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineBeforeStart, HeadraceError
from headrace.core.hashing import TENANT_SALT_BYTES
from headrace.core.ids import RequestId
from headrace.core.sampling import SamplingParams
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.account import Ending, RequestAccount
from headrace.gateway.generation.answer_encoder import AnswerEncoder, EventRecorder, RecordEvents
from headrace.gateway.generation.answer_memory import AnswerMemory
from headrace.gateway.generation.config import RequestConfig
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.progress import RequestProgress
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.sse import LAST_EVENT_ID, EventLog, SseStream
from headrace.gateway.limits.reservation import LimitReservation
from headrace.gateway.sessions.fitting import Fitted
from headrace.gateway.sessions.history import History
from headrace.gateway.upstream.generation_request import Conversation, EarlierOutput, GenerationRequest, PrincipalFacts
from headrace.gateway.upstream.seam import EventStream, Prepared
from headrace.gateway.upstream.served_models import ChosenModel, FallbackChain, ModelTable, ServedModel, fallback_chain
from headrace.observe.finished_request import Asked
from headrace.policy.admission import UnsentRequest
from headrace.policy.limits.price import Price, highest

ASKED_PARAMETERS = Asked._fields[Asked._fields.index("n") :]


class Call(Struct, frozen=True, kw_only=True, eq=False):
    """One generating request.

    config, models     of the configuration that the request began with
    parsed             the request's body; the session stage puts the session's history before the messages
    asked, model       the model that the client named, or its route chose, and the model that answers, which `choose_model` may change
    shadow             gets a copy of the request
    fallbacks          models that may answer in the place of `asked`
    after              the same call at the model that may answer after a failure; raises an error where there is none. None: no
                       other model may answer
    memory             the part of `charges` that the answer uses
    deadline_at        on the clock of `Exchange.arrived_at`; None: no deadline
    answer_id          id of the request that began the stream
    created            Unix seconds at which the answer was begun
    history            messages of a chat, from `take_turn` on with the session's; empty for a completion
    earlier            output of the stream that this request continues, set by `resume`
    session, unsent, admit, has_fallback  see `GenerationRequest`
    """

    exchange: Exchange
    account: RequestAccount
    charges: RequestCharges
    config: RequestConfig
    models: ModelTable
    parsed: ParsedRequest
    params: SamplingParams
    memory: AnswerMemory
    reservation: LimitReservation
    ending: Ending
    asked: ServedModel
    model: ServedModel
    shadow: ServedModel | None
    salt: bytes
    deadline_at: float | None
    answer_id: RequestId
    created: int
    history: History
    earlier: EarlierOutput | None = None
    session: str = ""
    unsent: UnsentRequest | None = None
    admit: Callable[[], None] | None = None
    fallbacks: FallbackChain = ()
    has_fallback: bool = False
    after: Callable[[HeadraceError], Call] | None = None

    @classmethod
    def opened(
        cls,
        exchange: Exchange,
        account: RequestAccount,
        charges: RequestCharges,
        parsed: ParsedRequest,
        *,
        config: RequestConfig,
        models: ModelTable,
        chosen: ChosenModel,
        salt_key: bytes,
        now: int,
    ) -> Self:
        """now: Unix seconds. Raises InvalidRequest, and Unavailable for a fallback that may be the adapter of a model that starts."""
        model, principal = chosen.model, account.principal
        assert account.reservation is not None, "every generating request has one"
        ending = Ending(model, chosen.steps)
        given = map(parsed.sampling.get, ASKED_PARAMETERS)
        account.asked = Asked(parsed.model or model.name, model.base_name, model.adapter, ending.version, parsed.is_streaming, *given)
        params = SamplingParams(**parsed.sampling).checked()
        parsed.check_caps(principal.priority)
        request_s = config.timeouts.request_s
        return cls(
            exchange=exchange,
            account=account,
            charges=charges,
            config=config,
            models=models,
            parsed=parsed,
            params=params,
            memory=AnswerMemory(charges, parsed, params),
            reservation=account.reservation,
            ending=ending,
            asked=model,
            model=model,
            shadow=chosen.shadow,
            salt=_salt(principal, parsed, salt_key),
            deadline_at=None if request_s is None else exchange.arrived_at + request_s,
            answer_id=exchange.request_id,
            created=now,
            history=History(parsed.prompt.messages) if isinstance(parsed.prompt, Conversation) else History(),
            fallbacks=fallback_chain(model, parsed.routing, models, principal, by=parsed.model),
        )

    @property
    def principal(self) -> Principal:
        return self.account.principal

    @property
    def continues(self) -> bool:
        """Whether the client wants the rest of an earlier stream."""
        return self.exchange.header(LAST_EVENT_ID) is not None

    @property
    def price(self) -> Price:
        return self.config.price_of(self.model.base_name)

    @property
    def highest_price(self) -> Price:
        """What the dearest of the models that may answer costs."""
        if not self.fallbacks:
            return self.price
        models = (self.asked, *[model for _, model in self.fallbacks])
        return highest([self.config.price_of(name) for name in {model.base_name for model in models}])

    @property
    def shown_model(self) -> str:
        """The name or alias that the client sent, unless another model answers."""
        asked = self.parsed.model
        return asked if asked is not None and asked in self.model.names else self.model.name

    def changed(self, **values: object) -> Self:
        return structs.replace(self, **values)

    def answered_by(self, model: ServedModel) -> Self:
        """The model of the call's `Ending` becomes the same."""
        self.ending.answered_by(model)
        return self.changed(model=model)

    def remaining_s(self, clock: Clock) -> float | None:
        if self.deadline_at is None:
            return None
        remaining_s = self.deadline_at - clock()
        if remaining_s <= 0:
            raise DeadlineBeforeStart(f"The request's deadline of {self.config.timeouts.request_s:g} s passed before it began.")
        return remaining_s

    def request(self) -> GenerationRequest:
        parsed = self.parsed
        return GenerationRequest(
            request_id=self.exchange.request_id,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            grammar=parsed.grammar,
            deadline_at=self.deadline_at,
            has_priority=parsed.has_priority,
            earlier=self.earlier,
            session=self.session,
            unsent=self.unsent,
            admit=self.admit,
            has_fallback=self.has_fallback,
            foreign_fields=parsed.foreign_fields,
            routing=parsed.routing,
            trace_headers={} if self.account.trace is None else self.account.trace.headers(),
        )

    def facts(self) -> PrincipalFacts:
        principal = self.principal
        return PrincipalFacts(
            tenant=principal.tenant,
            priority=self.parsed.priority,
            tier=principal.tier.terms(principal.tier_name),
            salt=self.salt,
            ceiling=self.reservation.ceiling(self.highest_price),
        )


def _salt(principal: Principal, parsed: ParsedRequest, key: bytes) -> bytes:
    """Clients without a key are one tenant, and none may learn what another one sent: their salts have no common part."""
    own = _digest_of(principal, parsed.cache_salt, key)
    return _digest_of(principal, "", key) + own if parsed.cache_salt and principal.key_id else own


def _digest_of(principal: Principal, cache_salt: str, key: bytes) -> bytes:
    salt = hashlib.blake2b(principal.tenant_key.encode(), digest_size=TENANT_SALT_BYTES, key=key, person=b"headrace-salt")
    salt.update(b"\0" + cache_salt.encode())
    return salt.digest()


def never() -> bool:
    return False


Replay = Callable[[EventStream, RequestProgress, AnswerEncoder, SseStream, RecordEvents], Awaitable[None]]


class Ready(Struct, frozen=True, kw_only=True, eq=False):
    """An answer that may begin, and what the stages want done with it.

    call             as its upstream, or the cache, answers it
    cache_tier       the cache that answers: "response" or "idempotency"; None: the upstream answers
    fitted           None: the conversation is unchanged
    event_log        None: the events have no ids
    replay           called before the first new event; sends what the client of a continued stream lacks
    recorders        each is given every event of the answer, also of a cache's
    before_end       each is awaited with the answer as it was made, before the last bytes are sent; when one raises, the answer ends
                     with it
    outlives_client  whether the answer goes on when the client has disconnected
    following        after a failure without output, the answer of the model that may follow; raises an error where there is none. None:
                     no other model may answer
    """

    call: Call
    prepared: Prepared
    cache_tier: str | None = None
    fitted: Fitted | None = None
    event_log: EventLog | None = None
    replay: Replay | None = None
    recorders: Sequence[EventRecorder] = ()
    before_end: Sequence[Callable[[Ready], Awaitable[None]]] = ()
    outlives_client: Callable[[], bool] = never
    following: Callable[[HeadraceError], Coroutine[Any, Any, Ready]] | None = None

    def changed(self, **values: object) -> Self:
        return structs.replace(self, **values)

    def recorded_by(self, recorder: EventRecorder) -> Self:
        return self.changed(recorders=(*self.recorders, recorder))


CallNext = Callable[[Call], Coroutine[Any, Any, Ready]]
"""Returns the answer before its first token."""
