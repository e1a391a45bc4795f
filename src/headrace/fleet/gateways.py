"""The gateway processes of a deployment: their shared address, their configuration file, and what they see of replicas.

Either all running gateways follow a change of the file, or the file is restored.

The supervisor's sockets, which never listen (SO_REUSEPORT), keep the port while gateways restart.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError, Unavailable
from headrace.core.load import AttemptCounts
from headrace.fleet.files import write_gateway_file
from headrace.fleet.keeper import ProcessKeeper
from headrace.policy.canary import ServedCounts
from headrace.wire.leash import ASLEEP, DRAINING, ModelStatus, ModelStatuses, ReloadRefused, ReplicaStatus, ReportedReplicaLoad
from headrace.wire.listening import bound_sockets, close_all, shown_host

STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class GatewaysView:
    """answers: one for each gateway that answered; silent: labels of those that did not"""

    answers: Sequence[ModelStatuses] = ()
    silent: Collection[str] = ()

    def is_ready(self, model: str, replica: str) -> bool | None:
        """Whether every serving gateway reports the replica as ready; None: unknown."""
        if not all(status is not None and status.is_ready for status in self._of(model, replica)):
            return False
        return None if self.silent or not self.answers else True

    def is_lost(self, model: str, replica: str) -> bool:
        """Whether every serving gateway lists the replica and cannot use it; False for one that drains or sleeps."""
        seen = [status for status in self._of(model, replica) if status is not None and not status.is_ready]
        is_seen_by_all = bool(self.answers) and not self.silent and len(seen) == len(self.answers)
        return is_seen_by_all and not any(status.reason in (ASLEEP, DRAINING) or status.is_refused for status in seen)

    def is_refused(self, model: str, replica: str) -> bool:
        seen = self._of(model, replica)
        return bool(seen) and not self.silent and all(status is not None and status.is_refused for status in seen)

    def why_refused(self, model: str) -> str:
        statuses = (status for seen in self.of(model) for status in seen.replicas.values())
        return next((status.reason for status in statuses if status.is_refused), "")

    def why_not_ready(self, model: str, replica: str) -> str:
        return next((status.reason for status in self._of(model, replica) if status is not None and status.reason), "")

    def num_open(self, model: str, replica: str) -> int | None:
        """None where a serving gateway did not answer."""
        return None if self.silent else sum(status.num_open for status in self._of(model, replica) if status is not None)

    def load(self, model: str, replica: str) -> ReportedReplicaLoad | None:
        """The last report; None: no gateway has one."""
        loads = [status.load for status in self._of(model, replica) if status is not None and status.load is not None]
        return min(loads, key=lambda load: load.age_s, default=None)

    def loads(self, model: str) -> dict[str, ReportedReplicaLoad]:
        """Replica -> its last report, where every gateway reports it as ready."""
        names = dict.fromkeys(name for seen in self.of(model) for name in seen.replicas)
        loads = {name: self.load(model, name) for name in names if self.is_ready(model, name)}
        return {name: load for name, load in loads.items() if load is not None}

    def attempts(self, model: str, replica: str) -> AttemptCounts:
        """Summed over the gateways that answered: the sums are less once a gateway has begun anew."""
        return AttemptCounts.summed(status.attempts for status in self._of(model, replica) if status is not None)

    def served(self, model: str, replica: str) -> ServedCounts:
        """Only what has ended counts as a request; what a replica could not take, or its client asked wrongly, does not."""
        sent, num_open = self.attempts(model, replica), self.num_open(model, replica) or 0
        num_ended = max(0, sent.num_sent - num_open - sent.num_refused - sent.num_rejected)
        return ServedCounts(num_ended, sent.num_lost + sent.num_failed, sent.num_begun, sent.ttft_s, sent.ttft_s_squared)

    def of(self, model: str) -> list[ModelStatus]:
        return [answer[model] for answer in self.answers if model in answer]

    def _of(self, model: str, replica: str) -> list[ReplicaStatus | None]:
        return [answer[model].replicas.get(replica) if model in answer else None for answer in self.answers]


class GatewayGroup:
    def __init__(self) -> None:
        self.keepers: list[ProcessKeeper] = []

    async def reload(self) -> None:
        """Raises ReloadRefused. Other gateways may have applied their files."""
        refusals = await asyncio.gather(*(keeper.reload() for keeper in self.keepers))
        if reason := next(filter(None, refusals), ""):
            raise ReloadRefused(reason)

    async def view(self) -> GatewaysView:
        serving = [keeper for keeper in self.keepers if keeper.is_serving]
        asked = zip(serving, await asyncio.gather(*map(_status, serving)), strict=True)
        # One that has ended meanwhile has no requests, and sees nothing.
        answers = {keeper.label: answer for keeper, answer in asked if keeper.is_serving}
        silent = [label for label, answer in answers.items() if answer is None]
        return GatewaysView([answer for answer in answers.values() if answer is not None], silent)


async def _status(keeper: ProcessKeeper) -> ModelStatuses | None:
    if keeper.asked is None:
        return None
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await keeper.asked.status()
    except (Unavailable, TimeoutError):
        return None


log = logging.getLogger(__name__)

REFUSED = "Its engine refused its configuration or weights."
UNREADABLE = "Its tokenizer or chat template cannot be used."
DIED = "Its engine ended before it served."
ENDS = "the deployment ends, and changes no more"
NO_REPLICA = "It has no replica now."


class TextRefused(ConfigError):
    """No gateway can use the tokenizer or chat template of a replica's model."""


class GatewayFile:
    def __init__(self, folder: Path, gateways: GatewayGroup, content: Mapping[str, object]) -> None:
        """Raises ConfigError. No gateway runs yet."""
        self._folder = folder
        self._gateways = gateways
        self._content = content
        self._is_final = False
        self.path = write_gateway_file(content, folder)

    async def offer(self, content: Mapping[str, object]) -> None:
        """Raises ReloadRefused or ConfigError: the content before then stays in force."""
        if self._is_final:
            raise ReloadRefused(ENDS)
        if content == self._content:
            return
        write_gateway_file(content, self._folder)
        try:
            await self._gateways.reload()
        except ReloadRefused:
            if self._is_final:
                raise
            await self._restore()
            raise
        if self._is_final:
            raise ReloadRefused(ENDS)
        self._content = content

    async def _restore(self) -> None:
        try:
            write_gateway_file(self._content, self._folder)
            await self._gateways.reload()
        except (ReloadRefused, ConfigError) as error:
            log.error("not every gateway has gone back to the configuration before: %s", error)

    async def limit_drain(self, drain_s: float, notice_s: float) -> None:
        """Gateways give running requests `drain_s` seconds once they are asked to end.

        Returns after `notice_s` seconds at the latest.
        """
        self._is_final = True
        timeouts = self._content["timeouts"]
        assert isinstance(timeouts, Mapping), "this program writes it"
        # Zero would mean no time at all to end a stream orderly; the gateway asks for a positive number.
        content = {**self._content, "timeouts": {**timeouts, "drain_s": max(drain_s, 0.1)}}
        try:
            write_gateway_file(content, self._folder)
            async with asyncio.timeout(notice_s):
                await self._gateways.reload()
        except TimeoutError:
            log.warning("not every gateway has read how long it may drain; it is ended when that time is over")
        except (ReloadRefused, ConfigError) as error:
            log.warning("not every gateway has read how long it may drain: %s", error)


def why_unavailable(failures: Iterable[HeadraceError]) -> str:
    """In words that clients may read: no paths."""
    errors = [*failures]
    if any(isinstance(failure, TextRefused) for failure in errors):
        return UNREADABLE
    if any(isinstance(failure, ConfigError) for failure in errors):
        return REFUSED
    return DIED if errors else NO_REPLICA


def check_can_listen(host: str, port: int) -> None:
    """Raises ConfigError."""
    close_all(_bind(host, port, is_shared=False))


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Holds the port until the block ends, for gateways that bind with SO_REUSEPORT. Raises ConfigError."""
    check_can_listen(host, port)
    reserved = _bind(host, port, is_shared=True)
    try:
        for each in reserved:
            # Otherwise a server that reuses the address could take the port while no gateway listens.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        taken: int = reserved[0].getsockname()[1]
        yield taken
    finally:
        close_all(reserved)


def _bind(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    try:
        return bound_sockets(host, port, shares_port=is_shared)[0]
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror):
        return ConfigError("gateway.host", f"{host!r} is not an address of this machine ({error.strerror})")
    if error.errno == errno.EADDRINUSE:
        remedy = "Stop the server that listens there, or choose another port: --port 0 takes a free one."
        return ConfigError("gateway.port", f"port {port} on {host} is in use", remedy)
    return ConfigError(
        "gateway.host", f"{shown_host(host)}:{port} cannot be listened on ({error.strerror})", "Choose another --host or --port."
    )
