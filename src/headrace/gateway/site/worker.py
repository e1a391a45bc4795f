"""One of several gateway processes that share a port: its place among them, and its part of the site's limits.

The kernel gives each worker a part of the connections (SO_REUSEPORT), so each holds a part of whatever a limit counts over all requests.
Nothing is borrowed between workers: a worker that is full refuses although another one is not. What bounds one request is the same in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.option import options
from headrace.gateway.http.config import Limits
from headrace.gateway.site.memory import default_prompt_bytes

SHARED_LIMITS = tuple(name for name, described in options(Limits) if described.is_shared)
"""Limits that count over all requests of a site. The other ones bound a request, a connection, an answer, or a share."""


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """A worker's place.

    index   its number, from 0, the same over restarts; label `worker` of its metrics
    folder  private directory of the deployment, which has the workers' sockets
    """

    index: int
    folder: Path

    @property
    def name(self) -> str:
        """As the supervisor calls it, in logs."""
        return f"gateway-{self.index}"

    def socket(self, index: int) -> Path:
        """Where worker `index` answers the other ones."""
        return self.folder / f"w{index}.sock"


def part_of(limits: Limits, num_workers: int, machine_bytes: int) -> Limits:
    """One worker's part of the limits of a site. machine_bytes: see `core.memory`"""
    if limits.max_prompt_bytes is None:
        limits = replace(limits, max_prompt_bytes=default_prompt_bytes(machine_bytes))
    return divided(limits, num_workers)


def divided(limits: Limits, num_workers: int) -> Limits:
    """Each shared limit over the number of workers, rounded up."""
    parts = {name: -(-getattr(limits, name) // num_workers) for name in SHARED_LIMITS if getattr(limits, name) is not None}
    return replace(limits, **parts)
