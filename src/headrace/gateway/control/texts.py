"""The tokenizers and templates of a running gateway's models: loaded in this process, and in the text workers' host.

A host loads at its start and never again. A model that comes therefore takes another host, which loads every model in use before the
workers are replaced (`text_workers.pool`); a model that leaves stays in the host until the next one is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from headrace.gateway.config import GatewayConfig, Limits
from headrace.gateway.text_workers.configured import host_config, key_variables
from headrace.gateway.text_workers.frames import HostConfig
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.workers import Workers
from headrace.text.folder import TextModel

LoadText = Callable[[str], TextModel]
"""A folder's tokenizer and template. Raises CheckpointError."""

MakeWorkers = Callable[[HostConfig, Collection[str]], Workers]
"""Workers that are not started. The second argument: environment variables that they may not inherit."""


NOT_OF_WORKERS = (
    *("max_connections", "max_header_bytes", "max_headers", "max_requests", "max_pending_bytes"),
    *("max_prompt_bytes", "max_answer_bytes", "max_tenant_share", "max_request_held_bytes"),
)
"""Limits that the gateway's own process alone holds requests to: a change of them takes no new workers."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedText:
    """One folder's text. name: what text workers call it, a model's name or derived from it; never used again for another folder"""

    name: str
    folder: str
    model: TextModel


@dataclass(frozen=True, slots=True)
class TextChange:
    """
    texts     of the next configuration's models, by model name
    host      what its text workers have
    withheld  environment variables that they do not
    workers   started; None: the present ones will do
    """

    texts: Mapping[str, LoadedText]
    host: HostConfig
    withheld: frozenset[str]
    workers: Workers | None

    async def close(self) -> None:
        """Close what was started for it; it is not applied."""
        if self.workers is not None:
            await self.workers.close()


class LoadedTexts:
    """What is loaded now. host: what the present text workers have"""

    def __init__(self, config: GatewayConfig, texts: Mapping[str, TextModel], pool: TextPool, load: LoadText, make: MakeWorkers) -> None:
        """texts: of each model that engines serve, by its name, as the pool's workers have them"""
        self.pool = pool
        self.host = host_config(config)
        self._withheld = key_variables(config)
        self.texts = {name: LoadedText(name, folder, texts[name]) for name, folder in self.host.models.items()}
        self._num_loaded = 0
        self._load = load
        self._make = make

    async def prepare(self, config: GatewayConfig, in_use: Collection[LoadedText]) -> TextChange:
        """Load what `config` needs; nothing is changed before `apply`. Raises CheckpointError.

        in_use  texts of running requests, which the next workers must have as well
        """
        texts = {model.name: await self._text(model.name, model.folder) for model in config.models if model.folder}
        needed = {text.name: text.folder for text in (*in_use, *texts.values())}
        withheld = self._withheld | key_variables(config)
        is_loaded = needed.items() <= self.host.models.items()
        if is_loaded and withheld == self._withheld and _of_workers(config.limits) == _of_workers(self.host.limits):
            return TextChange(texts, self.host, withheld, None)
        host = HostConfig(needed, config.limits)
        workers = self._make(host, withheld)
        try:
            await workers.start()
        except BaseException:
            await workers.close()
            raise
        return TextChange(texts, host, withheld, workers)

    def apply(self, change: TextChange) -> None:
        self.texts = dict(change.texts)
        self.host, self._withheld = change.host, change.withheld
        if change.workers is not None:
            self.pool.replace(change.workers, max_workers=change.host.limits.max_text_workers)

    async def _text(self, model: str, folder: str) -> LoadedText:
        known = self.texts.get(model)
        if known is not None and known.folder == folder:
            return known
        self._num_loaded += 1
        name = model if model not in self.host.models else f"{model} ({self._num_loaded})"
        return LoadedText(name, folder, await asyncio.to_thread(self._load, folder))


def _of_workers(limits: Limits) -> Limits:
    """The limits that text workers read, or that say how many there are; the other ones as they are by default."""
    default = Limits()
    return replace(limits, **{name: getattr(default, name) for name in NOT_OF_WORKERS})
