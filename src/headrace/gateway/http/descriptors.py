"""Computes at start how many connections this process can hold, from the number of file descriptors that it may open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.machine.descriptors import num_open, raise_limit

OWN = 40
"""Descriptors reserved for the event loop, gRPC, the request log, the listener, and files that are open for a moment."""

PER_REPLICA = 4
"""Descriptors reserved for the connection to one replica."""

MAX_FOREIGN_CONNECTIONS = 256
"""Requests under way at one foreign server. Each has a connection of its own."""

PER_FOREIGN = 2
"""Descriptors reserved for what a foreign server is asked beside requests: its models and its metrics."""

TEXT_HOST = 2
"""Descriptors for the socket to the text workers' host, and for a worker's end of a socket pair until the host has it. Each worker has one
more."""

MIN_CONNECTIONS = 8
"""Connections without which the gateway refuses to start."""

ULIMIT_STEP = 4096
"""The remedy for too few descriptors names a multiple of this, with SPARE beyond what is needed."""

SPARE = 1024

MAX_REFUSALS = 64
"""Connections that are being answered 503 at one time; one more closes the oldest."""


@dataclass(frozen=True, slots=True)
class ConnectionLimit:
    """max_connections: connections served at a time; max_refusals: further connections that are being answered 503 at a time"""

    max_connections: int
    max_refusals: int


def connection_limit(
    max_connections: int, num_replicas: int, num_foreign: int = 0, *, num_text_workers: int, num_connections: int = 0
) -> ConnectionLimit:
    """The connections that this process, or a child it starts now, can serve. Raises the soft limit of open files if necessary.

    num_foreign      foreign servers of all models
    num_connections  client connections that are open now. Beside them, open connections to replicas are counted twice, so the result is a
                     little too low

    Raises ConfigError when fewer than MIN_CONNECTIONS fit.
    """
    kept = OWN + PER_REPLICA * num_replicas + (MAX_FOREIGN_CONNECTIONS + PER_FOREIGN) * num_foreign + num_text_workers + TEXT_HOST
    taken = num_open() - num_connections + kept
    most = raise_limit(taken + max_connections + MAX_REFUSALS)
    return divide(max_connections, taken, most)


def divide(max_connections: int, taken: int, most: int) -> ConnectionLimit:
    """Divide the free descriptors: an eighth for refusals, the rest for connections.

    taken  descriptors in use or reserved
    most   limit of open descriptors

    Raises ConfigError when MIN_CONNECTIONS do not fit.
    """
    free = most - taken
    refusals = max(2, min(MAX_REFUSALS, free // 8))
    least = min(max_connections, MIN_CONNECTIONS)
    if free - refusals < least:
        needed = taken + 2 + least
        suffices = math.ceil((needed + SPARE) / ULIMIT_STEP) * ULIMIT_STEP
        raise ConfigError(
            "open files",
            f"a process may have {most} (ulimit -n), {taken} are in use or kept for replicas, foreign servers, text workers and logs, "
            f"and {least} connections need {needed}",
            f"Raise the limit: ulimit -n {suffices}, or LimitNOFILE= of the service.",
        )
    return ConnectionLimit(min(max_connections, free - refusals), refusals)
