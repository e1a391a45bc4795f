"""The tree of all exceptions that this package defines: what each means, and the HTTP status a client gets for it.

    HeadraceError                  root of what is raised on purpose
    |- InvalidRequest              a field of a request breaks a rule: field, limit, value, remedy -> 400
    |  |- ModelNotFound            names what is served -> 404
    |  |- ContentRefused           a foreign server's content filter refuses the prompt -> 400
    |  |- ContextLengthExceeded    prompt and output together do not fit the model's context -> 400
    |  `- RequestTooLarge          a body, a prompt or an answer is over a cap -> 413
    |     `- BodyTooLarge          more body bytes than the cap -> 413
    |- Unauthorized                no valid key -> 401
    |  `- KeyRevoked               the key of an open request was revoked -> 401
    |- UnusableKey                 a valid key whose tier is not configured here -> 403
    |- HeadRefused                 the request line or a header is refused; says why without what the client sent
    |  |- Forbidden                a Host or Origin that this listener does not answer to -> 403
    |  |- RouteNotFound            no such path -> 404
    |  `- MethodNotAllowed         the path has other methods -> 405
    |- TemporaryRefusal            something that may pass by itself
    |  |- UnknownStream            a Last-Event-ID names no stream of this tenant -> 404
    |  |- StreamConflict           a stream that another request continues, or that this one cannot -> 409
    |  `- IdempotencyConflict      the first request with an Idempotency-Key runs, or its answer was not kept -> 409
    |- UnknownSession              a session that this tenant does not have -> 404
    |- SessionConflict             another request of the session is being answered, or was meanwhile -> 409
    |- IdempotencyMismatch         an Idempotency-Key that another request has used -> 422
    |- ReadTimeout                 the client did not send its body in time -> 408
    |- UnsupportedMediaType        the body is not JSON in UTF-8 -> 415
    |  `- UnsupportedEncoding      a Content-Encoding that is not undone here -> 415
    |- Overloaded                  a bounded queue is full; says when to retry -> 429
    |  |- QueueFull                an engine's waiting queue has no room; its loop adds when to retry -> 429
    |  |- ModelBusy                the model's queue is longer than the request may wait -> 429
    |  `- RateLimitExceeded        a limit of the caller has no room now -> 429
    |     `- QuotaExhausted        the tokens or the money of a day or a month do not suffice -> 429
    |- ClientLeft                  the client closed the connection; for the log alone -> 499
    |- SlowReader                  the client reads too slowly; for the log alone -> 499
    |- SequenceFailed              the engine failed this sequence alone -> 500
    |  `- GenerationFailed         `LLM.generate`: some sequences failed; holds all outputs
    |- WorkerFault                 a text worker failed by a fault of ours or of the model's files -> 500
    |- AttemptFailed               one attempt at a foreign server failed; holds the error that clients get where no other follows
    |- Unavailable                 no replica can take the request now; it can be sent again -> 503
    |  |- Draining                 the gateway shuts down and takes nothing new -> 503
    |  `- ReplicaLost              the replica of a running stream is gone -> 503
    |- DeadlineExceeded            the deadline passed while the answer was being made -> 504
    |  `- DeadlineBeforeStart      the deadline passed before any token was computed -> 504
    |- ForkedProcess               `LLM`: this process was forked from one that has made an engine; it is a RuntimeError too
    |- EngineFatal                 the device or the engine's own state is lost: the process ends and is started anew
    |  `- LeaseError               leases of KV blocks were used wrongly
    |- StoreFailed                 a store cannot be reached, is full or broken
    |  |- EntryTooLarge            one entry is over a limit of the store
    |  `- TooMuchToWrite           entries come faster than the store writes them
    |- SinkFailed                  usage records cannot be sent to where they are kept
    |  `- ClickHouseRefused        ClickHouse answered with an error
    |- ConnectionLost              wire: a session with an engine is over
    |  `- NotListening             wire: nothing is at the engine's address
    |- HandshakeRefused            wire: a connection to an engine's port is closed; the engine logs why
    |- Mismatch                    wire: gateway and engine do not fit together
    |- MalformedFrame              wire: a frame breaks the format
    |- StreamLost                  wire: the gateway left, or lost its lease
    |- PlanCodecError              bytes that are not a plan
    |- ConfigError                 start: path in the configuration, value, remedy
    |  |- MissingKey               start: a section lacks a key that it must have
    |  |- UnknownKey               start: a key that its section does not have
    |  |- InsecureStore            start: a store on another machine without encryption or authentication
    |  |- NeedsExactlyOne          start: a section with both or none of two keys
    |  |- TextRefused              a replica whose model has a tokenizer or chat template that no gateway can use
    |- CheckpointError             start: a model's file and the reason
    |- CannotBind                  start: the gateway's address is taken
    |- CannotListen                start: the engine's address is taken
    |- ReloadRefused               supervisor: a child could not apply its changed file, and changed nothing
    |- FleetFailed                 a process of the fleet cannot be kept running
    |- ControlBusy                 fleet: another command changes the deployment
    |- UsageRefused                command line: a flag or a pair of flags that is not supported
    |- OutputLost                  standard output cannot be written
    |- ServerFailed                command line: a server could not be reached, or answered with an error
    `- BandwidthUnknown            benchmarks: the read bandwidth could not be measured

Six classes stand outside the tree, each raised and caught within one package: `BrokenStream`, `GatewayGone`, `NotGbnf`,
`OtherEndGone`, `PatternRefused`, `UnknownToken`.
Statuses come from one table, `gateway.http.errors`. A message may be shown to a client unless it is about the wire, the start or a fault
of ours: no paths outside the operator's own, no addresses, no tracebacks. tests/house/test_errors.py holds this page.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

MAX_FIELD_CHARS = 160


class HeadraceError(Exception):
    """Root of every error that this code raises on purpose."""

    def __reduce__(self) -> tuple[Callable[..., HeadraceError], tuple[object, ...]]:
        """Pickled for a parent process (multiprocessing, executors) without the constructor, whose arguments are not those of Exception."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[HeadraceError], args: tuple[object, ...], attributes: dict[str, object]) -> HeadraceError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class InvalidRequest(HeadraceError):
    """A field of a request breaks a rule.

    field   dotted name as the client wrote it, e.g. "top_p" or "messages[3].content", shortened to MAX_FIELD_CHARS
    limit   the rule as text with its numbers, e.g. "0 < top_p <= 1"
    value   the client's value, shortened; None hides it. `given` is the whole value
    remedy  what to do instead
    """

    def __init__(self, field: str, limit: str, value: object = None, remedy: str = "") -> None:
        if len(field) > MAX_FIELD_CHARS:  # it may hold keys of the client's
            field = field[: MAX_FIELD_CHARS - 3] + "..."
        self.field, self.limit, self.given, self.value, self.remedy = field, limit, value, shorten(value), remedy
        shown = f", got {self.value}" if value is not None else ""
        super().__init__(f"{field}: expected {limit}{shown}." + (f" {remedy}" if remedy else ""))

    def at(self, field: str) -> InvalidRequest:
        return InvalidRequest(field, self.limit, self.given, self.remedy)


class ModelNotFound(InvalidRequest):
    def __init__(self, name: str, served: list[str]) -> None:
        self.served = served
        super().__init__("model", f"one of: {', '.join(served) or 'no model is served'}", name, "GET /v1/models lists what is served.")


class RequestTooLarge(InvalidRequest):
    """A request exceeds a cap on its size: body bytes, prompt tokens, KV blocks. Its form is valid."""


class Unauthorized(HeadraceError):
    """The request has no key, or an unknown one. The message does not say which."""


class UnusableKey(HeadraceError):
    """The key is valid, but the configuration lacks the tier of the key or of its tenant. The log names the tier."""


class Overloaded(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class QueueFull(Overloaded):
    """An engine's waiting queue has no room. The engine's loop sends it as Overloaded, with a retry time."""


class Unavailable(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(HeadraceError):
    """The request's deadline passed before its answer was complete. A stream has delivered everything generated before that."""


class DeadlineBeforeStart(DeadlineExceeded):
    """The request's deadline passed before it was sent to an engine: nothing was computed."""


class SequenceFailed(HeadraceError):
    """The engine could not continue this sequence. Other sequences are not affected."""


class EngineFatal(HeadraceError):
    """Going on could give wrong answers. The engine process ends with an exit status of its own and is started anew."""


class ConfigError(HeadraceError):
    """A value of the configuration breaks a rule.

    where   the value's path in the file, or the flag or variable that set it
    reason  the rule and how the value breaks it; does not repeat `where`
    remedy  what to do instead
    """

    def __init__(self, where: str, reason: str, remedy: str = "") -> None:
        self.where, self.reason, self.remedy = where, reason, remedy
        super().__init__(f"{where}: {reason}." + (f" {remedy}" if remedy else ""))

    def at(self, where: str) -> ConfigError:
        moved = type(self).__new__(type(self))
        vars(moved).update(vars(self))
        ConfigError.__init__(moved, where, self.reason, self.remedy)
        return moved


class CheckpointError(HeadraceError):
    def __init__(self, file: str, reason: str, remedy: str = "") -> None:
        self.file, self.reason, self.remedy = file, reason, remedy
        super().__init__(f"{file}: {reason}." + (f" {remedy}" if remedy else ""))


class ShownValue(str):
    """A value that `shorten` made in another process. Messages show it unchanged."""


def shorten(value: object, limit: int = 80) -> str:
    """A client's value as JSON in ASCII, bounded and printable, so that a message or a log line may contain it."""
    if isinstance(value, ShownValue):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    few = dict(islice(value.items(), limit)) if isinstance(value, dict) else value
    few = few[: limit + 1] if isinstance(few, str | list | tuple) else few
    try:
        text = json.dumps(few, default=repr)
    except (TypeError, ValueError):  # keys or numbers that JSON does not have
        text = ascii(few)
    return text if len(text) <= limit else text[: limit - 3] + "..."
