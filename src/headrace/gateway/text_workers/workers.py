"""The protocols between the pool and its workers. `processes` implements them; tests run jobs in their own process, or script them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.core.errors import CheckpointError
from headrace.gateway.text_workers import frames

HOST_LOST = -1
"""Stands for the signal that ended a worker where it is not known, because the host is gone as well."""


class Worker(Protocol):
    """One worker. It does one job at a time."""

    def send(self, data: bytes) -> None:
        """Begin a job, given as a frame."""
        ...

    def kill(self) -> None:
        """End it, whatever it does; `Owner.ended` is called."""
        ...


class Owner(Protocol):
    """Receives a worker's answers and its end. `pool.TextPool` is one."""

    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None: ...

    def ended(self, worker: Worker, number: int) -> None:
        """number: of the signal that ended it, 0 for none, HOST_LOST."""
        ...


class Workers(Protocol):
    """Where workers come from."""

    @property
    def reason(self) -> str:
        """Why no worker can be started now, in a form that may be shown to clients; empty: one can."""
        ...

    @property
    def failures(self) -> Mapping[str, CheckpointError]:
        """Models whose text cannot be used, each with the reason: workers take no job for them."""
        ...

    async def start(self) -> None:
        """Returns once each model's text is loaded, or in `failures`. Raises CheckpointError where workers cannot be started at all."""
        ...

    async def add(self, owner: Owner) -> Worker:
        """A new worker, ready for a job. Raises OSError when there can be none now."""
        ...

    async def close(self) -> None: ...
