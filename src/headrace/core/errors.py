"""The tree of all exceptions that this package defines: what each means, and the HTTP status a client gets for it.

    HeadraceError                  root of what is raised on purpose
    |- InvalidRequest              a field of a request breaks a rule: field, limit, value, remedy -> 400
    |  |- ModelNotFound            not served -> 404
    |  |- ContentRefused           a foreign server's filter refuses the prompt -> 400
    |  |- ContextLengthExceeded    prompt and output exceed the context -> 400
    |  `- RequestTooLarge          over a cap -> 413
    |     `- BodyTooLarge          of body bytes -> 413
    |- Unauthorized                no valid key -> 401
    |  `- KeyRevoked               revoked meanwhile -> 401
    |- UnusableKey                 a valid key whose tier is not configured here -> 403
    |- HeadRefused                 request line or header; the message shows nothing of it
    |  |- Forbidden                a Host or Origin -> 403
    |  |- ReaderRefused            a key of the role reader, and a path that is not for readers -> 403
    |  |- RouteNotFound            no such path -> 404
    |  |- RequestNotFound          no request to explain -> 404
    |  `- MethodNotAllowed         the path has other methods -> 405
    |- TemporaryRefusal            may pass by itself
    |  |- UnknownStream            a Last-Event-ID names no stream of this tenant -> 404
    |  |- StreamConflict           continued by another request, or not by this one -> 409
    |  `- IdempotencyConflict      the first request with an Idempotency-Key runs, or its answer was not kept -> 409
    |- UnknownSession              none of this tenant's -> 404
    |- SessionConflict             another request of the session runs, or ran meanwhile -> 409
    |- IdempotencyMismatch         the key was used by another request -> 422
    |- ReadTimeout                 of the client's body -> 408
    |- UnsupportedMediaType        not JSON in UTF-8 -> 415
    |  `- UnsupportedEncoding      a Content-Encoding -> 415
    |- Overloaded                  says when to retry -> 429
    |  |- QueueFull                at an engine, whose loop adds when to retry -> 429
    |  |- TextQueueFull            prompts wait to be read, whatever model they are for -> 429
    |  |- ModelBusy                the model's queue is longer than the request may wait -> 429
    |  `- RateLimitExceeded        a limit of the caller -> 429
    |     `- QuotaExhausted        tokens or money of a day or month -> 429
    |- ClientLeft                  for the log alone -> 499
    |- SlowReader                  for the log alone -> 499
    |- SequenceFailed              this sequence alone -> 500
    |  `- GenerationFailed         `LLM.generate`: holds all outputs
    |- WorkerFault                 a text worker failed -> 500
    |- AttemptFailed               at a foreign server; holds the error that clients get where no other attempt follows
    |- Unavailable                 no replica can take the request now -> 503
    |  |- Draining                 the gateway shuts down -> 503
    |  |- Moved                    gateway: a waiting request goes to a replica that came
    |  `- ReplicaLost              the replica of a running stream is gone -> 503
    |- DeadlineExceeded            the answer is incomplete -> 504
    |  `- DeadlineBeforeStart      nothing was computed -> 504
    |- ForkedProcess               `LLM`: in a fork of a process that has made an engine; a RuntimeError too
    |- EngineFatal                 device or state is lost: the process ends and is started anew
    |  |- LeaseError               of KV blocks
    |  `- OtherProtocol            what listens at a rank's address is no rank
    |- StoreFailed                 a store cannot be reached, is full or broken
    |  |- EntryTooLarge            over a limit of the store
    |  `- TooMuchToWrite           entries come faster than the store writes them
    |- SinkFailed                  usage records cannot be sent
    |  `- ClickHouseRefused        ClickHouse answered with an error
    |- ConnectionLost              wire: a session with an engine is over
    |  `- NotListening             wire: nothing is at the engine's address
    |- HandshakeRefused            wire: a connection to an engine's port is closed; the engine logs why
    |- Mismatch                    wire: gateway and engine do not fit together
    |- MalformedFrame              wire: a frame breaks the format
    |- StreamLost                  wire: the gateway left, or lost its lease
    |- PlanCodecError              bytes that are not a plan
    |- ConfigError                 start: path, reason, remedy
    |  |- MissingKey               start
    |  |- UnknownKey               start
    |  |- InsecureStore            start: a store on another machine without encryption or authentication
    |  |- NeedsExactlyOne          start: both or none of two keys
    |  |- TextRefused              a replica whose model has a tokenizer or chat template that no gateway can use
    |- CheckpointError             start: a model's file and the reason
    |- RegistryFailed              start, `headrace registry`: a registry cannot be reached, or refuses
    |- CannotBind                  start: the gateway's address is taken
    |- CannotListen                start: the engine's address is taken
    |- ReloadRefused               supervisor: a child changed nothing
    |- NotScaling                  fleet: another process scales a model
    |- KubernetesFailed            fleet: a cluster's API server refuses, or gives no answer
    |- FleetFailed                 a process of the fleet cannot be kept running
    |- AgentLost                   fleet: Ray has given up the actor that runs a replica, or its node
    |- ControlBusy                 fleet: another command changes the deployment
    |- UsageRefused                command line: unsupported flags
    |- OutputLost                  standard output cannot be written
    |- ServerFailed                command line: a server that cannot be reached or answers with an error
    `- BandwidthUnknown            benchmarks: the read bandwidth could not be measured

Six classes stand outside the tree, each within one package: `BrokenStream`, `GatewayGone`, `NotGbnf`,
`OtherEndGone`, `PatternRefused`, `UnknownToken`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

MAX_FIELD_CHARS = 160


class HeadraceError(Exception):
    """A message may be shown to clients unless it is about the wire, the start or a fault of ours."""

    def __reduce__(self) -> tuple[Callable[..., HeadraceError], tuple[object, ...]]:
        """Pickles without the constructor, whose arguments are not those of Exception."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[HeadraceError], args: tuple[object, ...], attributes: dict[str, object]) -> HeadraceError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class InvalidRequest(HeadraceError):
    """Refuses a request for one of its fields. Surfaces rename "prompt", "grammar" and others (`dialect.parse.error_as_written`), for which
    a subclass keeps this constructor.

    field   dotted name as the client wrote it, e.g. "messages[3].content", shortened to MAX_FIELD_CHARS
    limit   the rule with its numbers, e.g. "0 < top_p <= 1"
    value   shortened; None hides it. `given` is the whole value
    """

    def __init__(self, field: str, limit: str, value: object = None, remedy: str = "") -> None:
        if len(field) > MAX_FIELD_CHARS:  # it may hold keys of the client's
            field = field[: MAX_FIELD_CHARS - 3] + "..."
        self.field, self.limit, self.given, self.value, self.remedy = field, limit, value, shorten(value), remedy
        shown = f", got {self.value}" if value is not None else ""
        super().__init__(f"{field}: expected {limit}{shown}." + (f" {remedy}" if remedy else ""))

    def at(self, field: str) -> InvalidRequest:
        return InvalidRequest(field, self.limit, self.given, self.remedy)


MAX_NAMED_MODELS = 32


class ModelNotFound(InvalidRequest):
    def __init__(self, name: str, served: list[str]) -> None:
        self.served = served
        more = f" and {len(served) - MAX_NAMED_MODELS} more" if len(served) > MAX_NAMED_MODELS else ""
        shown = ", ".join(served[:MAX_NAMED_MODELS]) or "no model is served"
        super().__init__("model", f"one of: {shown}{more}", name, "GET /v1/models lists what is served.")


class RequestTooLarge(InvalidRequest):
    """A cap on body bytes, prompt tokens or KV blocks; the form is valid."""


class Unauthorized(HeadraceError):
    """No key, or an unknown one: the message does not say which."""


class UnusableKey(HeadraceError):
    """The configuration lacks the tier of the key or of its tenant. The log names the tier."""


class Overloaded(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class QueueFull(Overloaded):
    """The engine's loop sends it as Overloaded, with a retry time."""


class TextQueueFull(Overloaded):
    """Another model would not help."""


class Unavailable(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(HeadraceError):
    """A stream has delivered everything generated before the deadline."""


class DeadlineBeforeStart(DeadlineExceeded):
    """Nothing was computed."""


class SequenceFailed(HeadraceError):
    """Other sequences are not affected."""


class EngineFatal(HeadraceError):
    """Going on could give wrong answers. The engine process ends with an exit status of its own."""


class ConfigError(HeadraceError):
    """
    where   the value's path in the file, or the flag or variable that set it
    reason  does not repeat `where`
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


class RegistryFailed(HeadraceError):
    def __init__(self, url: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{url}: {reason}." + (f" {remedy}" if remedy else ""))


class ShownValue(str):
    """Made by `shorten` in another process. Messages show it unchanged."""


def shorten(value: object, limit: int = 80) -> str:
    """A client's value as JSON in ASCII, bounded and printable, for messages and the log."""
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


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
