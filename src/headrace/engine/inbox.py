"""Messages from other threads to the loop, in order, and the number of sequences in them that the loop has not taken yet.

Only submitted sequences are counted, not cancels, finishes or preparers' answers: gateways read how much work waits.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

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


class Inbox:
    """`put` from any thread, `take` on the loop's.

    num_taken  sequences of the Submits taken so far; only the loop's thread changes it
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_put = 0
        self.num_taken = 0

    def put(self, message: Message) -> None:
        """Never blocks for longer than another `put` takes."""
        if isinstance(message, Submit):
            with self._lock:  # before it can be taken: never more is taken than was put
                self._num_put += message.request.params.n
        self._messages.put(message)

    def num_put_since(self, num_taken: int) -> int:
        """Sequences submitted so far, beyond the first `num_taken`."""
        return self._num_put - num_taken

    def take(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when there is none, after `timeout_s` if one is given."""
        try:
            message = self._messages.get_nowait() if timeout_s is None else self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, Submit):
            self.num_taken += message.request.params.n
        return message
