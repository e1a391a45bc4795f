"""Defines the protocols between the pool and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.core.errors import CheckpointError
from headrace.gateway.text_workers import frames

HOST_LOST = -1
"""Signal of a worker that ended with its host."""


class Worker(Protocol):
    """Does one job at a time."""

    def send(self, data: bytes) -> None: ...

    def kill(self) -> None:
        """`Owner.ended` is called afterwards."""
        ...


class Owner(Protocol):
    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None: ...

    def ended(self, worker: Worker, number: int) -> None:
        """number: of the signal that ended the worker; 0: none; or HOST_LOST"""
        ...


class Workers(Protocol):
    @property
    def reason(self) -> str:
        """In words that clients may see; empty: a worker can be started."""
        ...

    @property
    def failures(self) -> Mapping[str, CheckpointError]:
        """Model -> why its text cannot be used."""
        ...

    async def start(self) -> None:
        """Return when each model's text is loaded or in `failures`. Raises CheckpointError if no worker can be started."""
        ...

    async def add(self, owner: Owner) -> Worker:
        """Raises OSError if none can be started now."""
        ...

    async def close(self) -> None: ...
