"""Gives running engines their lists of adapters: all engines of a model follow a change, or the list before it holds again in each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from headrace.core.errors import ConfigError
from headrace.core.tasks import RunningTasks
from headrace.fleet.adapters import AdapterLists
from headrace.fleet.config import ModelSpec, runs_alike
from headrace.fleet.files import write_adapters
from headrace.fleet.replica_processes import ReplicaProcess, ReplicaProcesses
from headrace.wire.leash import ReloadRefused

log = logging.getLogger(__name__)


class EngineAdapters:
    """lists: what engines have that serve, and what those get that are started"""

    def __init__(self, lists: AdapterLists, processes: ReplicaProcesses) -> None:
        self.lists = lists
        self._processes = processes
        self._tasks = RunningTasks()

    @asynccontextmanager
    async def changed(self, lists: AdapterLists, models: Sequence[ModelSpec], required: str = "") -> AsyncIterator[None]:
        """In the block the engines of `models` have the new lists; if it raises or is cancelled, the ones before again.

        required: an adapter that every engine must take that serves. Raises ReloadRefused with the first reason, or ConfigError.
        """
        before, self.lists = self.lists, lists
        following = self._following(models)
        specs_before = [process.spec for process in following]
        by_name = {spec.name: spec for spec in models}
        _set_specs(following, [by_name[process.files.model] for process in following])
        try:
            await self._offer(models, required)
            yield
        except (Exception, asyncio.CancelledError):
            self.lists = before
            _set_specs(following, specs_before)
            await asyncio.shield(self._tasks.start(self._go_back(models), "adapters before"))
            raise

    def digests(self, model: str) -> dict[str, Mapping[str, str]]:
        """Replica that serves -> name -> digest of its adapters."""
        serving = [process for process in self._processes.values() if process.files.model == model and process.keeper.is_serving]
        return {process.files.name: _mapping(process.keeper.facts.get("adapters")) for process in serving}

    async def _offer(self, models: Sequence[ModelSpec], required: str) -> None:
        serving = []
        for process in self._following(models):
            if process.keeper.is_serving:
                self._write(process, required)
                serving.append(process)
                continue
            self._write(process, "")
            # It may have read its file already, and answers once it serves.
            self._tasks.start(self._when_it_serves(process), f"adapters of {process.files.name}")
        refusals = await asyncio.gather(*(self._reload(process, required) for process in serving))
        for process, reason in zip(serving, refusals, strict=True):
            if reason:
                raise ReloadRefused(f"{process.files.name}: {reason}")

    def _following(self, models: Sequence[ModelSpec]) -> list[ReplicaProcess]:
        """One with other options is being replaced, and keeps its list."""
        specs = {spec.name: spec for spec in models}
        return [
            process
            for process in self._processes.values()
            if not process.is_unlisted and process.files.model in specs and runs_alike(process.spec, specs[process.files.model])
        ]

    def _write(self, process: ReplicaProcess, required: str) -> None:
        write_adapters(process.files.config, self.lists.sources(process.files.model, required))

    async def _reload(self, process: ReplicaProcess, required: str) -> str:
        """Once it has answered or died, nothing is required of an engine that is started again: others may take long to answer."""
        reason = await process.keeper.reload()
        if required and process in self._processes.values():
            self._write(process, "")
        return reason

    async def _when_it_serves(self, process: ReplicaProcess) -> None:
        if reason := await process.keeper.reload(timeout_s=None):
            log.error("%s does not take its adapters: %s", process.files.name, reason)

    async def _go_back(self, models: Sequence[ModelSpec]) -> None:
        try:
            await self._offer(models, "")
        except (ReloadRefused, ConfigError) as error:
            log.error("not every engine has gone back to the adapters before: %s", error)


def _set_specs(processes: Sequence[ReplicaProcess], specs: Sequence[ModelSpec]) -> None:
    for process, spec in zip(processes, specs, strict=True):
        process.spec = spec


def _mapping(value: object) -> Mapping[str, str]:
    return value if isinstance(value, Mapping) else {}
