"""The right to change a deployment, which one command at a time holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from headrace.core.errors import HeadraceError


class ControlBusy(HeadraceError):
    """Another command changes the deployment."""


class CommandSlot:
    """holder: name of the command that has it; empty while none has"""

    def __init__(self) -> None:
        self.holder = ""
        self._free = asyncio.Event()
        self._free.set()

    async def wait_free(self) -> None:
        """Until no command has it. Another one may take it before the caller does."""
        await self._free.wait()

    @contextmanager
    def held(self, name: str) -> Iterator[Callable[[], None]]:
        """Held until the block ends, or until it calls what it is given. Raises ControlBusy where another command has it."""
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
