"""Keeps the commands that a gateway has not written yet, and packs them into frames.

Cancels and finishes are written first: until they arrive the engine goes on computing what they end. A cancel of a Submit that was not
written removes both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.core.errors import RequestTooLarge
from headrace.core.finish import FinishReason
from headrace.core.request import EngineRequest, PriorityClass
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_cancel, encode_finish, encode_submit
from headrace.wire.codec.request import set_remaining
from headrace.wire.service import Handle

MAX_FRAME_BYTES = 2**20
MAX_SUBMIT_BYTES = 8 * MAX_FRAME_BYTES


@dataclass(slots=True)
class _Submit:
    command: pb.Command
    num_bytes: int
    num_tokens: int
    priority: PriorityClass
    deadline_at: float | None
    finishes: list[pb.Command] = field(default_factory=list)


class UnwrittenCommands:
    def __init__(self) -> None:
        self._urgent: deque[pb.Command] = deque()
        self._submits: dict[Handle, _Submit] = {}
        self.num_prefill_tokens = 0

    def tokens_of(self, lowest: PriorityClass) -> list[int]:
        return [waiting.num_tokens for waiting in self._submits.values() if waiting.priority <= lowest]

    @property
    def handles(self) -> list[Handle]:
        return list(self._submits)

    def __bool__(self) -> bool:
        return bool(self._urgent or self._submits)

    def submit(self, request: EngineRequest, handle: Handle) -> None:
        """Raises InvalidRequest or RequestTooLarge for a request that the wire cannot carry."""
        command = encode_submit(request, handle)
        num_bytes = command.ByteSize()
        if num_bytes > MAX_SUBMIT_BYTES:
            raise RequestTooLarge("prompt", f"at most {MAX_SUBMIT_BYTES} bytes on the wire", num_bytes, "Shorten the prompt.")
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self._submits[handle] = _Submit(command, num_bytes, num_tokens, request.priority, request.deadline_at)
        self.num_prefill_tokens += num_tokens

    def cancel(self, handle: Handle) -> None:
        waiting = self._submits.pop(handle, None)
        if waiting is None:
            self._urgent.append(encode_cancel(handle))
        else:
            self.num_prefill_tokens -= waiting.num_tokens

    def finish(self, handle: Handle, index: int, keep_tokens: int, reason: FinishReason) -> None:
        command = encode_finish(handle, index, keep_tokens, reason)
        waiting = self._submits.get(handle)
        (self._urgent if waiting is None else waiting.finishes).append(command)

    def take(self, now: float) -> pb.ClientFrame:
        """Deadlines are the time that remains at `now`."""
        frame, num_bytes = pb.ClientFrame(), 0
        while self._urgent and num_bytes < MAX_FRAME_BYTES:
            num_bytes += self._urgent[0].ByteSize()
            frame.commands.append(self._urgent.popleft())
        while self._submits:
            handle, waiting = next(iter(self._submits.items()))
            if num_bytes and num_bytes + waiting.num_bytes > MAX_FRAME_BYTES:
                break
            del self._submits[handle]
            self.num_prefill_tokens -= waiting.num_tokens
            set_remaining(waiting.command.submit, waiting.deadline_at, now)
            frame.commands.extend((waiting.command, *waiting.finishes))
            num_bytes += waiting.num_bytes
        return frame
