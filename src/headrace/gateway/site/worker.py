"""A gateway worker, one of several gateway processes on one port: its number, its socket, and its part of the site's limits.

The kernel spreads connections over the workers (SO_REUSEPORT). A limit on all requests of the site together is therefore divided by the
number of workers; a limit on one request is the same in each worker. Workers do not borrow from each other: a worker that has reached its
part refuses a request although another worker has room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.option import options
from headrace.gateway.http.config import Limits
from headrace.gateway.site.memory import default_prompt_bytes

SHARED_LIMITS = tuple(name for name, described in options(Limits) if described.is_shared)
"""Names of the limits that count over all requests of a site. Every other limit bounds one request, connection or answer, or is a share."""


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """Number and sockets of a worker.

    index   number of the worker, from 0; a restarted worker keeps its number. Label `worker` of its metrics
    folder  private directory of the deployment, with a socket per worker
    """

    index: int
    folder: Path

    @property
    def name(self) -> str:
        """Name of the worker in logs and in the supervisor."""
        return f"gateway-{self.index}"

    def socket(self, index: int) -> Path:
        """Path of the Unix socket at which worker `index` answers the other workers."""
        return self.folder / f"w{index}.sock"


def part_of(limits: Limits, num_workers: int, machine_bytes: int) -> Limits:
    """One worker's part of the limits of a site.

    machine_bytes  memory of the machine (`machine.memory`); sets `max_prompt_bytes` where the site does not
    """
    if limits.max_prompt_bytes is None:
        limits = replace(limits, max_prompt_bytes=default_prompt_bytes(machine_bytes))
    return divided(limits, num_workers)


def divided(limits: Limits, num_workers: int) -> Limits:
    """Limits in which each shared limit is divided by the number of workers and rounded up."""
    parts = {name: -(-getattr(limits, name) // num_workers) for name in SHARED_LIMITS if getattr(limits, name) is not None}
    return replace(limits, **parts)
