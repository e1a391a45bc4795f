"""Holds the desired state of a deployment: its configuration, and the engine options of each revision of a model."""

from __future__ import annotations

from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.config_change import runs_alike
from headrace.policy.deployment import Deployment, RolloutOptions


class DesiredState:
    """What the deployment should be.

    config   the configuration, with the secrets of this site filled in
    options  (model, revision) -> the options that its processes are started with
    """

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.options: dict[tuple[str, int], ModelSpec] = {}

    def copy(self) -> DesiredState:
        made = DesiredState(self.config)
        made.options = {**self.options}
        return made

    def follow(self, config: FleetConfig, deployment: Deployment) -> list[str]:
        """Set another configuration, and `deployment`'s targets by it. Changed options of a model begin a rollout; failed replicas are
        tried again.

        Returns the models whose earlier failures no longer apply.
        """
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
        """Give a revision that a command has made the options of the configuration."""
        for spec in self.config.models:
            if (target := deployment.targets.get(spec.name)) is not None:
                self.options.setdefault((spec.name, target.revision), spec)
