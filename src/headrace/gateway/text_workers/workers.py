"""Defines the protocols between the pool and its workers.

`processes` implements them. Tests run jobs in their own process, or script the replies.
"""

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
        """Kill the worker, also in a job. `Owner.ended` is called afterwards."""
        ...


class Owner(Protocol):
    """Receives a worker's answers and its end. `pool.TextPool` is one."""

    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None: ...

    def ended(self, worker: Worker, number: int) -> None:
        """Take a worker's end. number: of the signal that ended it; 0: none; or HOST_LOST"""
        ...


class Workers(Protocol):
    """A source of workers."""

    @property
    def reason(self) -> str:
        """The reason why no worker can be started now, in words that clients may see; empty: one can be."""
        ...

    @property
    def failures(self) -> Mapping[str, CheckpointError]:
        """Model -> why its text cannot be used. Workers take no job for such a model."""
        ...

    async def start(self) -> None:
        """Return when each model's text is loaded or in `failures`. Raises CheckpointError if no worker can be started."""
        ...

    async def add(self, owner: Owner) -> Worker:
        """A new worker, ready for a job. Raises OSError if none can be started now."""
        ...

    async def close(self) -> None: ...
