"""Reads the configuration of a running deployment again, from the same file, environment and flags as at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.cli.serve_config import ServeConfig
from headrace.core.differences import differences
from headrace.fleet.config import FleetConfig


class ServeSource:
    """The configuration of `headrace serve` as a `fleet.control.ConfigSource`."""

    def __init__(self, held: ServeConfig, load: Callable[[], ServeConfig], resolve: Callable[[str], Path]) -> None:
        """
        held     the configuration that the deployment was started with
        load     reads the whole configuration again
        resolve  name of a model in the file -> its local folder
        """
        self._held = self._last = held
        self._load = load
        self._resolve = resolve

    @property
    def held(self) -> ServeConfig:
        """The configuration in force."""
        return self._held

    def read(self) -> FleetConfig:
        """The whole configuration, checked. May fetch a model. Raises ConfigError."""
        self._last = self._load()
        return self._last.fleet(self._resolve).checked()

    def differences(self) -> list[str]:
        found = differences(_with_names(self._held), _with_names(self._last))
        return [str(difference) for difference in found] or ["the configuration is as it was"]

    def accept(self) -> None:
        self._held = self._last


def _with_names(config: ServeConfig) -> ServeConfig:
    """Each model with the name it is served by, so that models are compared by name."""
    return replace(config, models=tuple(replace(model, name=model.served_name) for model in config.models))
