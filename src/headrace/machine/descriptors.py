"""Descriptors of this process: how many it may have open, and how many it has. Files, sockets and pipes all count."""

from __future__ import annotations

import os
import resource

UNKNOWN_OPEN = 32
"""Assumed where the system does not list the open descriptors."""


def raise_limit(wanted: int) -> int:
    """Raise the soft limit on open files to `wanted`, or to the hard limit if that is lower. Never lowers it. Returns the limit in
    force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    allowed = min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return allowed
    return soft


def num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return UNKNOWN_OPEN
