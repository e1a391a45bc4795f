"""Reads a JSON file as the configuration of a deployment of tests, and again at a reload."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.differences import differences
from headrace.fleet.config import FleetConfig


class FileSource:
    """A `fleet.control.ConfigSource`. make: the file's content -> the configuration"""

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], FleetConfig]) -> None:
        self.file = path
        self._make = make
        self._held = self._last = json.loads(path.read_text())

    def config(self) -> FleetConfig:
        return self._make(self._held)

    def read(self, pulled: Mapping[str, Path]) -> FleetConfig:
        self._last = json.loads(self.file.read_text())
        return self._make(self._last).checked()

    def renewed(self, pulled: Mapping[str, Path], versions: Mapping[str, str]) -> FleetConfig:
        raise AssertionError("no model of these deployments is in a registry")

    def differences(self) -> list[str]:
        return [str(difference) for difference in differences(self._held, self._last)]

    def accept(self) -> None:
        self._held = self._last
