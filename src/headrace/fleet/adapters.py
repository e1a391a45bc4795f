"""Knows which LoRA adapters the models of a deployment have: those of the configuration, and those that operators loaded since.

The latter are kept in one file of the state folder, by the name of their model, so that they survive a restart. A name of the configuration
wins over theirs. `fleet.adapter_commands` has the commands.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.core.adapters import MAX_ADAPTERS, AdapterSource, resolve_below
from headrace.core.errors import ConfigError
from headrace.core.model_names import MODEL_NAME
from headrace.core.regular_files import in_time, read_file
from headrace.fleet.config import FleetConfig
from headrace.machine.private_files import check_private_file, write_private_file

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20

Folders = Mapping[str, Mapping[str, str]]
"""Model -> adapter's name -> its folder."""


@dataclass(frozen=True, slots=True)
class AdapterLists:
    """configured  adapters of the configuration
    loaded      adapters that operators loaded, also of models that are not served now
    left_out    (model, name) of a loaded one -> why no engine gets it
    unloaded    (model, name) of configured ones that are not served until the next reload
    root        below it are the folders of the loaded ones that are not left out
    """

    configured: Folders
    loaded: Folders = field(default_factory=dict)
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unloaded: frozenset[tuple[str, str]] = frozenset()
    root: Path | None = None

    def sources(self, model: str, required: str = "") -> list[AdapterSource]:
        """What the model's engines are given. required: a loaded adapter without which they shall refuse the list"""
        configured = [
            AdapterSource(name=name, path=path) for name, path in self._of(self.configured, model) if (model, name) not in self.unloaded
        ]
        loaded = [
            AdapterSource(name=name, path=path, root=str(self.root), is_optional=name != required)
            for name, path in self._of(self.loaded, model)
            if (model, name) not in self.left_out
        ]
        assert self.root is not None or not loaded
        return [*configured, *loaded]

    def _of(self, folders: Folders, model: str) -> Iterator[tuple[str, str]]:
        return iter(folders.get(model, {}).items())

    def with_loaded(self, config: FleetConfig, model: str, name: str, path: str) -> AdapterLists:
        """Raises ConfigError. May block."""
        if MODEL_NAME.fullmatch(name) is None:
            raise ConfigError("NAME", f"{name!r} is not a model name", "Letters, digits and ._/:@- only, at most 256.")
        if reason := _why_taken(config, name):
            raise ConfigError("NAME", f"{name!r} {reason}", "Load it under another name.")
        if other := next((each for each in self.loaded if name in self.loaded[each] and each != model and config.spec(each)), None):
            raise ConfigError("NAME", f"{name!r} is an adapter of {other}", "Load it under another name.")
        folder = str(folder_below(config.adapters_root, path))
        loaded = {**self.loaded, model: {**self.loaded.get(model, {}), name: folder}}
        if len(loaded[model]) + len(self.configured.get(model, {})) > MAX_ADAPTERS:
            raise ConfigError("NAME", f"{model} has {MAX_ADAPTERS} adapters, and may have no more", "Unload one first.")
        left_out = {place: reason for place, reason in self.left_out.items() if place != (model, name)}
        return replace(self, loaded=loaded, left_out=left_out, root=config.adapters_root)

    def without_configured(self, model: str, name: str) -> AdapterLists:
        return replace(self, unloaded=self.unloaded | {(model, name)})

    def lines(self) -> list[str]:
        """What operators should know."""
        return [f"the adapter {name} of {model}, loaded at run time, is left out: {why}" for (model, name), why in self.left_out.items()]

    def without_loaded(self, model: str, name: str) -> AdapterLists:
        rest = {each: path for each, path in self.loaded[model].items() if each != name}
        left_out = {place: reason for place, reason in self.left_out.items() if place != (model, name)}
        return replace(self, loaded={**self.loaded, model: rest}, left_out=left_out)


def read_lists(config: FleetConfig) -> AdapterLists:
    """What cannot be read or used is left out, since a deployment must start without it. May block."""
    try:
        loaded = {} if config.adapters_file is None else read_kept(config.adapters_file)
    except ConfigError as error:
        log.error("adapters loaded at run time are left out: %s", error)
        loaded = {}
    left_out: dict[tuple[str, str], str] = {}
    models: dict[str, str] = {}
    for spec in config.models:
        for name, path in loaded.get(spec.name, {}).items():
            taken = _why_taken(config, name) or (f"is an adapter of {models[name]}" if name in models else "")
            if not spec.has_adapters:
                reason = f"{spec.name} has no adapters now (enable_lora)"
            else:
                reason = f"{name} {taken}" if taken else _why_not_below(config.adapters_root, path)
            if reason:
                left_out[spec.name, name] = reason
            else:
                models[name] = spec.name
    return AdapterLists({spec.name: spec.adapters for spec in config.models}, loaded, left_out, root=config.adapters_root)


def _why_taken(config: FleetConfig, name: str) -> str:
    if name in config.routes:
        return "is a route's name in the configuration"
    for spec in config.models:
        if name in (spec.name, *spec.aliases):
            return f"is a model's name in the configuration: {spec.name}"
        if name in spec.adapters:
            return f"is an adapter of {spec.name} in the configuration"
    return ""


def _why_not_below(root: Path | None, path: str) -> str:
    try:
        folder_below(root, path)
    except ConfigError as error:
        return error.reason
    return ""


def folder_below(root: Path | None, path: str) -> Path:
    """As `resolve_below`. Raises ConfigError alone, also where there is no such folder."""
    if root is None:
        remedy = "Name the folder below which adapters may be loaded: lora_root in the configuration, or --lora-root."
        raise ConfigError("PATH", "there is no lora_root", remedy)
    try:
        found = in_time(lambda: resolve_below(root, path))
        if not in_time(lambda: os.path.isdir(found)):
            raise ConfigError("PATH", f"there is no folder {path!r}", f"A relative path begins at lora_root ({root}).")
    except OSError as error:
        raise ConfigError("PATH", f"{path!r} cannot be resolved ({error.strerror})") from None
    return found


def read_kept(file: Path) -> dict[str, dict[str, str]]:
    """Raises ConfigError for a file that is damaged, too large, or not this user's alone."""
    if not os.path.lexists(file):
        return {}
    remedy = "Load the adapters again: that writes the file anew."
    check_private_file(str(file), str(file))
    try:
        data = json.loads(read_file(file, MAX_KEPT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), f"cannot be read as JSON ({getattr(error, 'strerror', None) or error})", remedy) from None
    kept = data.get("adapters") if isinstance(data, dict) else None
    if not isinstance(kept, dict) or not all(
        isinstance(adapters, dict) and all(map(_is_kept, adapters.items())) for adapters in kept.values()
    ):
        raise ConfigError(str(file), "has not the names and folders of adapters", remedy)
    return kept


def _is_kept(item: tuple[str, object]) -> bool:
    name, path = item
    return MODEL_NAME.fullmatch(name) is not None and isinstance(path, str) and os.path.isabs(path)


def keep(file: Path | None, model: str, loaded: Mapping[str, str]) -> None:
    """Writes what operators have loaded for a model; what the file has of others stays. Raises ConfigError; nothing is changed then."""
    if file is None:
        return
    try:
        kept = read_kept(file)
    except ConfigError as error:
        log.error("%s is written anew: %s", file, error)
        kept = {}
    others = {name: adapters for name, adapters in kept.items() if name != model}
    data = json.dumps({"adapters": {**others, **({model: dict(loaded)} if loaded else {})}}, indent=1).encode()
    if len(data) > MAX_KEPT_BYTES:
        raise ConfigError(str(file), f"would have more than {MAX_KEPT_BYTES} bytes", "Unload adapters first.")
    try:
        write_private_file(file, data)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be written ({error.strerror})", "Free space there, and load the adapter again.") from error
