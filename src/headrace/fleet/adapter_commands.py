"""Carries out `headrace adapters load|unload|list` (docs/control.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.core.errors import ConfigError
from headrace.fleet.adapters import AdapterLists, keep
from headrace.fleet.commands import CommandSlot, Hear, say
from headrace.fleet.config import ModelSpec
from headrace.fleet.reconciler import Reconciler


class AdapterCommands:
    def __init__(self, reconciler: Reconciler, slot: CommandSlot) -> None:
        self._reconciler = reconciler
        self._slot = slot

    @property
    def _lists(self) -> AdapterLists:
        return self._reconciler.adapters.lists

    async def load(self, name: str, path: str, model: str | None, hear: Hear) -> None:
        """Raises ConfigError, ControlBusy, or ReloadRefused where an engine refuses: nothing was changed then."""
        with self._slot.held(f"adapters load {name}"):
            spec = self._served(model)
            config = self._reconciler.config
            lists = await asyncio.to_thread(self._lists.with_loaded, config, spec.name, name, path)
            loaded = lists.loaded[spec.name]
            async with self._reconciler.adapters.changed(lists, [spec], required=name):
                await asyncio.to_thread(keep, config.adapters_file, spec.name, loaded)
            say(hear, f"{spec.name}: {name} is loaded from {loaded[name]}")

    async def unload(self, name: str, model: str | None, hear: Hear) -> None:
        """Raises as `load`."""
        with self._slot.held(f"adapters unload {name}"):
            spec = self._with_adapter(name, model)
            if name in self._lists.loaded.get(spec.name, {}):
                lists = self._lists.without_loaded(spec.name, name)
                async with self._reconciler.adapters.changed(lists, [spec]):
                    await asyncio.to_thread(keep, self._reconciler.config.adapters_file, spec.name, lists.loaded[spec.name])
                say(hear, f"{spec.name}: {name} is unloaded")
                return
            async with self._reconciler.adapters.changed(self._lists.without_configured(spec.name, name), [spec]):
                pass
            say(hear, f"{spec.name}: {name} is unloaded until the next reload or restart: the configuration lists it")

    def rows(self) -> list[dict[str, object]]:
        """One per adapter. state: empty where every replica that serves its model has it, else why not"""
        lists = self._lists
        return [
            {"name": name, "model": spec.name, "path": path, "origin": origin, **self._state(spec.name, name, origin)}
            for spec in self._reconciler.config.models
            for origin, folders in (("configuration", lists.configured), ("run time", lists.loaded))
            for name, path in folders.get(spec.name, {}).items()
        ]

    def _state(self, model: str, name: str, origin: str) -> Mapping[str, object]:
        lists = self._lists
        if origin == "configuration" and (model, name) in lists.unloaded:
            return {"digest": None, "state": "unloaded until the next reload"}
        if origin != "configuration" and (model, name) in lists.left_out:
            return {"digest": None, "state": f"left out: {lists.left_out[model, name]}"}
        digests = self._reconciler.adapters.digests(model)
        without = [replica for replica, adapters in digests.items() if name not in adapters]
        state = f"not at {', '.join(without)}: the log says why" if without else "" if digests else "no replica serves"
        return {"digest": next((adapters[name] for adapters in digests.values() if name in adapters), None), "state": state}

    def _served(self, model: str | None) -> ModelSpec:
        specs = [spec for spec in self._reconciler.config.models if spec.has_adapters]
        found = [spec for spec in specs if model is None or spec.name == model]
        if len(found) == 1:
            return found[0]
        if not specs:
            raise ConfigError("--model", "no model here has adapters", "Set enable_lora in models[].engine, or start with --enable-lora.")
        known = f"Models with adapters: {', '.join(spec.name for spec in specs)}."
        raise ConfigError(
            "--model", "is missing, and several models have adapters" if model is None else f"{model!r} has no adapters", known
        )

    def _with_adapter(self, name: str, model: str | None) -> ModelSpec:
        lists = self._lists
        having = {
            spec.name: spec
            for spec in self._reconciler.config.models
            if model in (None, spec.name)
            and (name in lists.loaded.get(spec.name, {}) or (name in spec.adapters and (spec.name, name) not in lists.unloaded))
        }
        if len(having) == 1:
            return next(iter(having.values()))
        if having:
            raise ConfigError("--model", f"is missing, and {name!r} is an adapter of {', '.join(having)}")
        raise ConfigError("NAME", f"{name!r} is not an adapter here", "`headrace adapters list` shows them.")
