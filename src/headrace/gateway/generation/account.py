"""What is written down of a request as it goes on: `RequestAccount` of every one, `Ending` of one that generates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from headrace.core.ids import RequestId
from headrace.gateway.access.principal import ANONYMOUS, Principal
from headrace.gateway.limits.reservation import LimitReservation
from headrace.gateway.upstream.seam import NO_USAGE, EventStream, Prepared, TokenUsage
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.finished_request import Answered, Asked, ModelStep
from headrace.observe.trace_context import TraceContext

_NOT_ASKED, _NOT_ANSWERED = Asked(), Answered()


class RequestAccount:
    """The caller of a request, and what becomes of it beside its bytes. `app` makes the finished request of it.

    principal      the caller; ANONYMOUS until its key is checked
    trace          where the request stands in a trace; None: in none
    reservation    what it takes of its limits; None: it has none
    asked          set where the model is found
    answered       set at the end of `generation.run`
    logged_prompt  JSON, for the usage record; None: prompts are not logged
    """

    __slots__ = ("answered", "asked", "logged_prompt", "principal", "reservation", "trace")

    def __init__(self) -> None:
        self.principal: Principal = ANONYMOUS
        self.trace: TraceContext | None = None
        self.reservation: LimitReservation | None = None
        self.asked, self.answered = _NOT_ASKED, _NOT_ANSWERED
        self.logged_prompt: str | None = None


class Ending:
    """What stages and the answer write down as a request goes on, and of which `generation.run` makes an `Answered`.

    ends                closed at the end of the request, also after an error
    model               that answers; at first the one that the client named
    continued_id        id of the answer that this request continues
    version             of its weights when it was chosen: its system_fingerprint
    prepared            None: no upstream has prepared the request yet
    stream              None: the answer has not begun
    has_summary         a model has summarised a part of the conversation, which is charged beside the answer
    used                None: no engine began an answer
    is_refused_at_end   a hook of `Ready.before_end` raised
    is_free             its turn could not be stored: its client sends it again, and pays for that one
    steps               the models that were chosen or passed over, in order
    """

    __slots__ = (
        "continued_id",
        "ends",
        "has_summary",
        "is_free",
        "is_refused_at_end",
        "model",
        "prepared",
        "steps",
        "stream",
        "used",
        "version",
    )

    def __init__(self, model: ServedModel, steps: Sequence[ModelStep] = ()) -> None:
        self.ends = AsyncExitStack()
        self.answered_by(model)
        self.continued_id: RequestId | None = None
        self.prepared: Prepared | None = None
        self.stream: EventStream | None = None
        self.used: TokenUsage | None = None
        self.has_summary = self.is_refused_at_end = self.is_free = False
        self.steps = list(steps)

    def answered_by(self, model: ServedModel) -> None:
        self.model, self.version = model, model.upstream.fingerprint

    def usage(self) -> TokenUsage:
        """What the answer's client is shown and charged."""
        usage = NO_USAGE if self.stream is None else self.stream.usage()
        return usage if self.prepared is None else self.prepared.counted(usage)
