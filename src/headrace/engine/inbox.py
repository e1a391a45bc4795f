"""Carries messages from other threads to the loop, in order.

A step can take seconds, and the loop takes no message meanwhile, so the Submits are bounded by bytes.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.errors import HeadraceError
from headrace.core.ids import PreparationId, RequestId
from headrace.core.load import NO_CLASS_LOADS, ClassLoad, ClassLoads, minus, plus
from headrace.core.request import EngineRequest, PriorityClass, check_bytes, submitted_bytes
from headrace.core.sleep import SleepLevel
from headrace.core.update import FinishReason


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest
    arrived: float
    work: SubmittedWork = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", SubmittedWork.of(self.request))


@dataclass(frozen=True, slots=True)
class Refuse:
    request_id: RequestId
    epoch: int
    priority: PriorityClass
    error: HeadraceError


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: RequestId
    index: int
    keep_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Satisfied:
    preparation_id: PreparationId
    what: str
    adapter_slot: int


@dataclass(frozen=True, slots=True)
class PrerequisiteFailed:
    preparation_id: PreparationId
    what: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends the loop's wait."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangeSleep:
    """level: None: the engine is to be awake. done: set by the loop"""

    level: SleepLevel | None
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends the loop with EngineFatal."""

    reason: str


Message = Submit | Refuse | Cancel | Finish | Satisfied | PrerequisiteFailed | Wake | ChangeSleep | Abort


class SubmittedWork(NamedTuple):
    """classes  a prompt counts once, however many sequences its request has; tokens include outputs of earlier attempts"""

    classes: ClassLoads = NO_CLASS_LOADS
    num_bytes: int = 0

    @classmethod
    def of(cls, request: EngineRequest) -> SubmittedWork:
        classes = list(NO_CLASS_LOADS)
        classes[request.priority] = ClassLoad(0, request.params.n, len(request.prompt_ids) + len(request.output_ids))
        return cls(tuple(classes), submitted_bytes(request))

    def plus(self, other: SubmittedWork) -> SubmittedWork:
        return SubmittedWork(plus(self.classes, other.classes), self.num_bytes + other.num_bytes)

    def since(self, earlier: SubmittedWork) -> SubmittedWork:
        return SubmittedWork(minus(self.classes, earlier.classes), self.num_bytes - earlier.num_bytes)


class Inbox:
    """`put` may be called from any thread, `take` only from the loop's. max_bytes: of the requests in the inbox"""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._put = SubmittedWork()
        self.taken = SubmittedWork()

    def put(self, message: Message) -> None:
        self._messages.put(self._counted(message) if isinstance(message, Submit) else message)

    def _counted(self, submit: Submit) -> Submit | Refuse:
        """Counted before it can be taken, so that never more is taken than was put."""
        request, work = submit.request, submit.work
        with self._lock:
            try:
                check_bytes(self._put.since(self.taken).num_bytes, work.num_bytes, self.max_bytes)
            except HeadraceError as error:
                return Refuse(request.request_id, request.epoch, request.priority, error)
            self._put = self._put.plus(work)
        return submit

    def put_since(self, taken: SubmittedWork) -> SubmittedWork:
        return self._put.since(taken)

    def take(self, timeout_s: float | None = None) -> Message | None:
        try:
            message = self._messages.get_nowait() if timeout_s is None else self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, Submit):
            self.taken = self.taken.plus(message.work)
        return message
