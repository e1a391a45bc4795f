"""Holds the desired state of a deployment: its configuration, and the engine options of each revision of a model."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.policy.deployment import Deployment, RolloutOptions

FIXED = ("admin", "site_key", "log_format", "run_dir", "engine_command", "gateway_command")

FIXED_GATEWAY = ("host", "port", "workers")

STORES = {"state": "state", "store": "gateway.store", "sessions": "gateway.sessions"}
"""Key of the gateways' file -> its path in the operator's."""


def runs_alike(before: ModelSpec, after: ModelSpec) -> bool:
    return (before.folder, dict(before.engine)) == (after.folder, dict(after.engine))


def with_choices_of_start(before: FleetConfig, after: FleetConfig) -> FleetConfig:
    kept = {"port": before.gateway["port"]} if not after.gateway.get("port") and "port" in before.gateway else {}
    return replace(after, site_key=after.site_key or before.site_key, gateway={**after.gateway, **kept})


def check_can_become(before: FleetConfig, after: FleetConfig, *, served: Container[str]) -> None:
    """Raises ConfigError naming the first option that takes a restart."""
    changed = [name for name in FIXED if getattr(before, name) != getattr(after, name)]
    paths = {**{name: f"gateway.{name}" for name in FIXED_GATEWAY}, **STORES}
    changed += [path for name, path in paths.items() if before.gateway.get(name) != after.gateway.get(name)]
    if changed:
        raise ConfigError(changed[0], "cannot change while the deployment runs", "Stop and start it for this, or write what it was.")
    folders = {model.name: model.folder for model in before.models}
    for model in after.models:
        if model.name in served and folders[model.name] != model.folder:
            remedy = "Add it under another name and reload; then remove this one, give its name to the new one as an alias, and reload."
            raise ConfigError(f"models[{model.name}]", "cannot have another folder while the deployment runs", remedy)


class DesiredState:
    """options: by (model, revision)"""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.options: dict[tuple[str, int], ModelSpec] = {}

    def copy(self) -> DesiredState:
        made = DesiredState(self.config)
        made.options = {**self.options}
        return made

    def follow(self, config: FleetConfig, deployment: Deployment) -> list[str]:
        """Returns the models whose earlier failures no longer apply."""
        self.config = config
        specs = {model.name: model for model in config.models if model.replicas}
        known = {name: self.options.get((name, target.revision)) for name, target in deployment.targets.items()}
        deployment.scale({name: spec.replicas for name, spec in specs.items()})
        anew = []
        for name, spec in specs.items():
            before = known.get(name)
            if before is not None and not runs_alike(before, spec):
                deployment.roll_out(name, RolloutOptions())
                anew.append(name)
            elif deployment.drop_failed(name):
                anew.append(name)
            self.options[name, deployment.targets[name].revision] = spec
        return anew

    def note_revisions(self, deployment: Deployment) -> None:
        for spec in self.config.models:
            if (target := deployment.targets.get(spec.name)) is not None:
                self.options.setdefault((spec.name, target.revision), spec)
