"""What of a gateway's configuration may change while it runs. Pure; `control.reload` applies it."""

from __future__ import annotations

from dataclasses import replace

from headrace.core.differences import differences
from headrace.core.errors import ConfigError
from headrace.gateway.config import GatewayConfig


def check_change(before: GatewayConfig, after: GatewayConfig) -> None:
    """Raise ConfigError naming the first difference that takes a restart."""
    for difference in differences(_without_replicas(before), _without_replicas(after)):
        raise ConfigError(difference.path, "cannot change while the gateway runs", "Start the gateway again for it, or write what it was.")


def _without_replicas(config: GatewayConfig) -> GatewayConfig:
    return replace(config, models=tuple(replace(model, replicas=()) for model in config.models))
