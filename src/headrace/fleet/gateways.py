"""The gateway processes of a deployment as one: all of them reload their file, or report the replicas that they see.

Each answers on its leash (`wire.leash`). A gateway that is being started again reads the newest file anyway, and has no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.core.errors import Unavailable
from headrace.fleet.keeper import ProcessKeeper
from headrace.wire.leash import DRAINING, ModelStatuses, ReloadRefused, ReplicaStatus

RELOAD_TIMEOUT_S = 60.0
"""Seconds that a gateway may take to apply its file: it loads the tokenizers of new models first."""

STATUS_TIMEOUT_S = 2.0
"""Seconds in which a gateway says what it sees. While one says nothing, it is not known whether a replica is ready."""


@dataclass(frozen=True, slots=True)
class GatewaysView:
    """What the gateways see.

    answers  of each gateway that answered
    silent   labels of gateways that serve and did not answer
    """

    answers: Sequence[ModelStatuses] = ()
    silent: Collection[str] = ()

    def is_ready(self, model: str, replica: str) -> bool | None:
        """Every gateway that serves reports it ready. None: not known, since one did not answer, or none serves."""
        if not all(status is not None and status.is_ready for status in self._of(model, replica)):
            return False
        return None if self.silent or not self.answers else True

    def is_lost(self, model: str, replica: str) -> bool:
        """Every gateway that serves has answered, has it in its list and cannot use it, for a fault that another process may not
        have: not because it drains, or its model's text cannot be used."""
        seen = [status for status in self._of(model, replica) if status is not None and not status.is_ready]
        is_seen_by_all = bool(self.answers) and not self.silent and len(seen) == len(self.answers)
        return is_seen_by_all and not any(status.reason == DRAINING or status.is_refused for status in seen)

    def is_refused(self, model: str, replica: str) -> bool:
        """Every gateway that serves has answered, and none can use the model's tokenizer or chat template."""
        seen = self._of(model, replica)
        return bool(seen) and not self.silent and all(status is not None and status.is_refused for status in seen)

    def why_refused(self, model: str) -> str:
        """Why a gateway cannot use the model's tokenizer or chat template; empty where it can."""
        statuses = (status for answer in self.answers for status in answer.get(model, {}).values())
        return next((status.reason for status in statuses if status.is_refused), "")

    def why_not_ready(self, model: str, replica: str) -> str:
        """The reason that the first gateway gives; empty where none gives one."""
        return next((status.reason for status in self._of(model, replica) if status is not None and status.reason), "")

    def num_open(self, model: str, replica: str) -> int | None:
        """Requests open at it, of all gateways; None where one did not answer."""
        return None if self.silent else sum(status.num_open for status in self._of(model, replica) if status is not None)

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
        serving = [keeper for keeper in self.keepers if keeper.is_serving]
        found = dict(zip(serving, await asyncio.gather(*map(_status, serving)), strict=True))
        answered = {keeper: answer for keeper, answer in found.items() if answer is not None}
        # One that has ended meanwhile has no requests, and sees nothing.
        silent = [keeper.label for keeper in serving if keeper not in answered and keeper.is_serving]
        return GatewaysView([answer for keeper, answer in answered.items() if keeper.is_serving], silent)


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
    """None: no answer."""
    if keeper.asked is None:
        return None
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await keeper.asked.status()
    except (Unavailable, TimeoutError):
        return None
