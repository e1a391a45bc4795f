"""Records the commands that change a running deployment: reload, rollout, scale, drain.

A command that was refused changed nothing and leaves no record. The caller gives the store of the records (`cli.serve`: the store of keys
and tenants, whose changes are recorded there too).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from headrace.core.errors import HeadraceError
from headrace.fleet.progress import Hear

log = logging.getLogger(__name__)

WriteAudit = Callable[[str, str, str, Mapping[str, object]], Awaitable[None]]
"""Writes one record: actor, action, subject, detail. Raises HeadraceError."""


async def not_kept(actor: str, action: str, subject: str, detail: Mapping[str, object]) -> None:
    """A `WriteAudit` that records nothing."""


class CommandAudit:
    def __init__(self, write: WriteAudit = not_kept) -> None:
        self._write = write

    async def record(self, actor: str, name: str, asked: Mapping[str, object], hear: Hear, failures: list[str] | None = None) -> None:
        """Record a command. If the record cannot be written, log that and report it to the operator.

        asked     the command's arguments
        failures  the parts of the command that failed
        """
        subject = str(asked.get("replica") or asked.get("model") or "deployment")
        try:
            await self._write(actor, f"deployment.{name}", subject, {**asked, "failures": failures} if failures else asked)
        except HeadraceError as error:
            log.error("the audit record of %s by %s cannot be written: %s", name, actor, error)
            hear(f"the audit record cannot be written: {error}")
