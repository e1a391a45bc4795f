"""Reads the configuration of a running deployment again, from the same file, environment and flags as at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.bundled import DEFAULT_MODEL
from headrace.cli.config.sections import ServeConfig
from headrace.cli.config.state import has_stored_keys
from headrace.core.differences import differences
from headrace.core.errors import ConfigError
from headrace.fleet.config import FleetConfig
from headrace.gateway.control.protections import check_keeps_protections, gives_up_keys


class ServeSource:
    """The configuration of `headrace serve` as a `fleet.control.ConfigSource`."""

    def __init__(
        self, held: ServeConfig, load: Callable[[], ServeConfig], resolve: Callable[[str], Path], file: Path | None = None
    ) -> None:
        """load: reads the whole configuration again; resolve: name of a model in the file -> its local folder"""
        self.file = None if file is None else file.absolute()
        self._held = self._last = held
        self._load = load
        self._resolve = resolve

    @property
    def held(self) -> ServeConfig:
        return self._held

    def read(self) -> FleetConfig:
        """The whole configuration, checked. May fetch a model. Raises ConfigError, also for one that loses what protects the server."""
        last = self._load()
        check_keeps(self._held, last)
        self._last = last
        return last.fleet(self._resolve).checked()

    def differences(self) -> list[str]:
        found = differences(_with_names(self._held), _with_names(self._last))
        return [str(difference) for difference in found] or ["the configuration is as it was"]

    def accept(self) -> None:
        self._held = self._last


def check_keeps(held: ServeConfig, last: ServeConfig) -> None:
    """Raise ConfigError for a configuration that lost its models or what protects the server (`gateway.control.protections`)."""
    before, after = held.gateway_before_start(), last.gateway_before_start()
    lost = {model.name for model in before.models} - {DEFAULT_MODEL}
    if {model.name for model in after.models} == {DEFAULT_MODEL} and len(lost) == len(before.models):
        reason = f"would be {DEFAULT_MODEL} alone, as in a file without models, and {', '.join(sorted(lost))} gone"
        raise ConfigError("models", reason, "Write the models again.")
    needs_stored = gives_up_keys(before, after)
    check_keeps_protections(before, after, has_stored_keys=needs_stored and has_stored_keys(last.state, last.gateway.store))


def _with_names(config: ServeConfig) -> ServeConfig:
    return replace(config, models=tuple(replace(model, name=model.served_name) for model in config.models))
