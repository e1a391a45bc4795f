"""Lets one command at a time change a deployment; another one is refused meanwhile (`ControlBusy`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from headrace.core.errors import HeadraceError


class ControlBusy(HeadraceError):
    """Another command changes the deployment."""


class CommandSlot:
    """Lets one command at a time change the deployment. holder: name of the running command; empty while none runs"""

    def __init__(self) -> None:
        self.holder = ""
        self._free = asyncio.Event()
        self._free.set()

    async def wait_free(self) -> None:
        """Wait until no command holds the slot. Another command may take the slot before the caller does."""
        await self._free.wait()

    @contextmanager
    def held(self, name: str) -> Iterator[Callable[[], None]]:
        """Hold the slot until the block ends, or until the block calls the yielded function. Raises ControlBusy if another command holds
        it."""
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
