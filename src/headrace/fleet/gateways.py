"""The gateway processes of a deployment as one: have all of them read their file again, and ask what all of them see.

Each answers on its leash (`wire.leash`). A gateway that is being started again reads the newest file anyway, and has no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import Unavailable
from headrace.fleet.keeper import ProcessKeeper
from headrace.wire.leash import ModelStatuses, ReloadRefused, ReplicaStatus

RELOAD_TIMEOUT_S = 60.0
"""Seconds that a gateway may take to apply its file: it loads the tokenizers of new models first."""

STATUS_TIMEOUT_S = 2.0
"""A gateway that does not say within these seconds what it sees counts as one that sees no ready replica."""


@dataclass(frozen=True, slots=True)
class GatewaysView:
    """What the gateways see.

    answers     of each gateway that answered
    num_silent  gateways that serve and did not answer
    """

    answers: Sequence[ModelStatuses] = ()
    num_silent: int = 0

    def is_ready(self, model: str, replica: str) -> bool:
        """Every gateway that serves reports it ready, and there is one."""
        seen = self._of(model, replica)
        return bool(self.answers) and not self.num_silent and all(status is not None and status.is_ready for status in seen)

    def why_not_ready(self, model: str, replica: str) -> str:
        """The reason that the first gateway gives; empty where none gives one."""
        return next((status.reason for status in self._of(model, replica) if status is not None and status.reason), "")

    def num_open(self, model: str, replica: str) -> int | None:
        """Requests open at it, of all gateways; None where one did not answer."""
        return None if self.num_silent else sum(status.num_open for status in self._of(model, replica) if status is not None)

    def _of(self, model: str, replica: str) -> list[ReplicaStatus | None]:
        return [answer.get(model, {}).get(replica) for answer in self.answers]


class GatewayGroup:
    """keepers: of the gateway processes; a list that may grow until they are started"""

    def __init__(self) -> None:
        self.keepers: list[ProcessKeeper] = []

    async def reload(self) -> None:
        """Have every running gateway apply its file. Raises ReloadRefused when one did not; the others have applied it."""
        refusals = await asyncio.gather(*(_why_refused(keeper) for keeper in self.keepers))
        if reason := next(filter(None, refusals), ""):
            raise ReloadRefused(reason)

    async def view(self) -> GatewaysView:
        found = await asyncio.gather(*(_status(keeper) for keeper in self.keepers if keeper.is_serving))
        answers = [answer for answer in found if answer is not None]
        return GatewaysView(answers, len(found) - len(answers))


async def _why_refused(keeper: ProcessKeeper) -> str:
    """Why a gateway has not applied its file; empty when it has, or reads it when it is started again."""
    if keeper.asked is None:
        return ""
    try:
        async with asyncio.timeout(RELOAD_TIMEOUT_S):
            await keeper.asked.reload()
    except ReloadRefused as refused:
        return str(refused)
    except Unavailable:
        return ""
    except TimeoutError:
        return f"{keeper.label} did not answer within {RELOAD_TIMEOUT_S:g} s"
    return ""


async def _status(keeper: ProcessKeeper) -> ModelStatuses | None:
    if keeper.asked is None:
        return {}
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await keeper.asked.status()
    except Unavailable:
        return {}  # it has just ended, and its requests with it
    except TimeoutError:
        return None
