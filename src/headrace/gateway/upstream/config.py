"""What the configuration says of the replicas of every model. Each model has a section of its own (`upstream.model_config`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How requests are shared between the replicas of a model.

    slow_start_s  seconds over which the share of a replica grows that has just connected while others serve; 0: all of it at once
    """

    slow_start_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """Seconds that hold for the replicas of every model. failover_s: of `timeouts`; slow_start_s: of `routing`"""

    failover_s: float
    slow_start_s: float
