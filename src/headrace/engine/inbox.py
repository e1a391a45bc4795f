"""Messages from other threads to the loop, in order, and how much submitted work is in them that the loop has not taken yet.

Only Submits are counted, not cancels, finishes or preparers' answers: gateways read how much work waits.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.finish import FinishReason
from headrace.core.ids import AdmissionId, RequestId
from headrace.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest
    arrived: float


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
    admission: AdmissionId
    what: str


@dataclass(frozen=True, slots=True)
class PrerequisiteFailed:
    admission: AdmissionId
    what: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends the loop's sleep and has no other effect."""


Message = Submit | Cancel | Finish | Satisfied | PrerequisiteFailed | Wake


class SubmittedWork(NamedTuple):
    """A sum over Submits. num_tokens: of prompts, and of outputs of earlier attempts; a prompt counts once however many sequences it has"""

    num_sequences: int = 0
    num_tokens: int = 0

    def with_submit(self, request: EngineRequest) -> SubmittedWork:
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        return SubmittedWork(self.num_sequences + request.params.n, self.num_tokens + num_tokens)

    def since(self, earlier: SubmittedWork) -> SubmittedWork:
        return SubmittedWork(self.num_sequences - earlier.num_sequences, self.num_tokens - earlier.num_tokens)


class Inbox:
    """`put` from any thread, `take` on the loop's.

    taken  sum over the Submits taken so far; only the loop's thread changes it
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._put = SubmittedWork()
        self.taken = SubmittedWork()

    def put(self, message: Message) -> None:
        """Never blocks for longer than another `put` takes."""
        if isinstance(message, Submit):
            with self._lock:  # before it can be taken: never more is taken than was put
                self._put = self._put.with_submit(message.request)
        self._messages.put(message)

    def put_since(self, taken: SubmittedWork) -> SubmittedWork:
        """What was submitted so far, beyond what was `taken` at an earlier moment."""
        return self._put.since(taken)

    def take(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when there is none, after `timeout_s` if one is given."""
        try:
            message = self._messages.get_nowait() if timeout_s is None else self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, Submit):
            self.taken = self.taken.with_submit(message.request)
        return message
