"""What commands that change a deployment share: one runs at a time, its progress goes to its operator and the log, and it is recorded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from headrace.core.errors import HeadraceError

log = logging.getLogger(__name__)

Hear = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelProgress:
    model: str
    text: str
    level: int = logging.INFO


class Progress:
    def __init__(self) -> None:
        self._listeners: list[tuple[Hear, Collection[str]]] = []

    @contextmanager
    def heard(self, hear: Hear, models: Collection[str]) -> Iterator[None]:
        listener = hear, models
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def say(self, line: ModelProgress) -> None:
        log.log(line.level, "%s", line.text)
        for hear, models in [*self._listeners]:
            if line.model in models:
                hear(line.text)


def say(hear: Hear, text: str) -> None:
    log.info("%s", text)
    hear(text)


def no_operator(text: str) -> None:
    """For a command whose lines go to the log alone."""


class ControlBusy(HeadraceError):
    """Another command changes the deployment."""


class CommandSlot:
    """holder: empty while none runs"""

    def __init__(self) -> None:
        self.holder = ""
        self._free = asyncio.Event()
        self._free.set()

    async def wait_free(self) -> None:
        await self._free.wait()

    @contextmanager
    def held(self, name: str) -> Iterator[Callable[[], None]]:
        """Holds the slot until the block ends or calls the yielded function. Raises ControlBusy."""
        if self.holder:
            raise ControlBusy(f"{self.holder} is running. Wait for it: `headrace status` shows how far it is.")
        self.holder = name
        self._free.clear()
        with ExitStack() as stack:
            stack.callback(self._release)
            yield stack.close

    def _release(self) -> None:
        self.holder = ""
        self._free.set()


WriteAudit = Callable[[str, str, str, Mapping[str, object]], Awaitable[None]]
"""Actor, action, subject, detail. Raises HeadraceError."""


async def not_kept(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
    """A `WriteAudit` that records nothing."""


class CommandAudit:
    def __init__(self, write: WriteAudit = not_kept) -> None:
        self._write = write

    async def record(self, actor: str, name: str, asked: Mapping[str, object], hear: Hear, failures: list[str] | None = None) -> None:
        subject = str(asked.get("replica") or asked.get("model") or "deployment")
        try:
            await self._write(actor, f"deployment.{name}", subject, {**asked, "failures": failures} if failures else asked)
        except HeadraceError as error:
            log.error("the audit record of %s by %s cannot be written: %s", name, actor, error)
            hear(f"the audit record cannot be written: {error}")
