"""Decodes the bodies of the admin socket's requests strictly: an unknown key is refused. docs/control.md says what the requests do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadBody:
    """No fields: everything is in the configuration file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBody:
    """model: None for all models. Other fields: see `policy.deployment.RolloutOptions`"""

    model: str | None = None
    max_surge: int = 1
    allow_outage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBody:
    model: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBody:
    """replica: None for the whole deployment. within_s: seconds until open requests move"""

    replica: str | None = None
    within_s: float
    allow_outage: bool = False
