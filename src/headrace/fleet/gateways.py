"""The gateway processes of a deployment as a group: the supervisor asks all of them to reload, or for the state of the replicas.

A question travels over each gateway's leash, the socket pair between supervisor and child (`wire.leash`). A gateway that is just
restarting is not asked: the new process reads the newest file when it starts, and has no open requests before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.core.errors import Unavailable
from headrace.fleet.keeper import ProcessKeeper
from headrace.wire.leash import DRAINING, ModelStatuses, ReloadRefused, ReplicaStatus

RELOAD_TIMEOUT_S = 60.0
"""Seconds that a gateway may take to apply its file. The gateway loads the tokenizers of new models first."""

STATUS_TIMEOUT_S = 2.0
"""Seconds that a gateway may take to report its replicas. Without the report of every gateway, the readiness of a replica is unknown."""


@dataclass(frozen=True, slots=True)
class GatewaysView:
    """The replicas' states as the gateways report them.

    answers  one report for each gateway that answered
    silent   labels of serving gateways that did not answer
    """

    answers: Sequence[ModelStatuses] = ()
    silent: Collection[str] = ()

    def is_ready(self, model: str, replica: str) -> bool | None:
        """Whether every serving gateway reports the replica as ready.

        None: unknown, since no gateway serves, or since one did not answer and no other one reports the replica as not ready.
        """
        if not all(status is not None and status.is_ready for status in self._of(model, replica)):
            return False
        return None if self.silent or not self.answers else True

    def is_lost(self, model: str, replica: str) -> bool:
        """Whether a new process in place of the replica may help: every serving gateway answered, lists the replica and cannot use it.

        False for a replica that drains, and for one whose tokenizer or chat template a gateway cannot use: a new process would not help.
        """
        seen = [status for status in self._of(model, replica) if status is not None and not status.is_ready]
        is_seen_by_all = bool(self.answers) and not self.silent and len(seen) == len(self.answers)
        return is_seen_by_all and not any(status.reason == DRAINING or status.is_refused for status in seen)

    def is_refused(self, model: str, replica: str) -> bool:
        """Whether every serving gateway answered, and no gateway can use the model's tokenizer or chat template."""
        seen = self._of(model, replica)
        return bool(seen) and not self.silent and all(status is not None and status.is_refused for status in seen)

    def why_refused(self, model: str) -> str:
        """Why some gateway cannot use the model's tokenizer or chat template; empty where every gateway can."""
        statuses = (status for answer in self.answers for status in answer.get(model, {}).values())
        return next((status.reason for status in statuses if status.is_refused), "")

    def why_not_ready(self, model: str, replica: str) -> str:
        """Why the replica is not ready, by the first gateway that gives a reason; empty where no gateway gives one."""
        return next((status.reason for status in self._of(model, replica) if status is not None and status.reason), "")

    def num_open(self, model: str, replica: str) -> int | None:
        """Number of requests that all gateways have open at the replica; None where a serving gateway did not answer."""
        return None if self.silent else sum(status.num_open for status in self._of(model, replica) if status is not None)

    def _of(self, model: str, replica: str) -> list[ReplicaStatus | None]:
        return [answer.get(model, {}).get(replica) for answer in self.answers]


class GatewayGroup:
    """The gateway processes of a deployment.

    keepers  one for each gateway process; complete before the processes are started
    """

    def __init__(self) -> None:
        self.keepers: list[ProcessKeeper] = []

    async def reload(self) -> None:
        """Have every running gateway apply its file.

        Raises ReloadRefused when a gateway refuses its file or does not answer in RELOAD_TIMEOUT_S. Other gateways may have applied theirs.
        """
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
    """Why a gateway has not applied its file; empty when the gateway has applied the file, or will read the file when it restarts."""
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
    """The report of one gateway; None when the gateway is not running or does not answer in STATUS_TIMEOUT_S."""
    if keeper.asked is None:
        return None
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await keeper.asked.status()
    except (Unavailable, TimeoutError):
        return None
