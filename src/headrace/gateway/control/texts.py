"""Loads the tokenizers and templates of a running gateway's models, in this process and in the text workers' host process.

A host loads models at its start and never again, so a new model takes another host, which loads every model in use. A model whose text
cannot be loaded fails alone, and is tried again at a reload; a reload that would make a serving model fail is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.errors import CheckpointError
from headrace.gateway.text_workers.frames import HostConfig, Workers
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.upstream.model_config import ModelConfig, key_variables, text_folders
from headrace.text.folder import TextModel

log = logging.getLogger("headrace.gateway")

LoadText = Callable[[str], TextModel]
"""Raises CheckpointError."""

MakeWorkers = Callable[[HostConfig, Collection[str]], Workers]
"""The second argument: environment variables that they may not inherit."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedText:
    """name: in text workers, never reused for other text"""

    name: str
    folder: str
    model: TextModel


@dataclass(frozen=True, slots=True)
class FailedText:
    folder: str
    error: CheckpointError


ModelTexts = Mapping[str, LoadedText | FailedText]
"""Without models that only foreign servers answer for."""


@dataclass(frozen=True, slots=True)
class TextChange:
    """The prepared texts of the next configuration. withheld: environment variables that text workers do not inherit; workers: None, the
    present ones are kept
    """

    texts: ModelTexts
    host: HostConfig
    withheld: frozenset[str]
    workers: Workers | None
    max_workers: int

    async def close(self) -> None:
        if self.workers is not None:
            await self.workers.close()


class LoadedTexts:
    """The loaded texts of the present configuration's models."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        texts: Mapping[str, TextModel | CheckpointError],
        pool: TextPool,
        load: LoadText,
        make: MakeWorkers,
    ) -> None:
        """pool: already started. Raises CheckpointError when no model can be served."""
        self.pool = pool
        loaded = {**texts, **pool.failures}
        self.texts: ModelTexts = {name: _text_of(name, folder, loaded[name]) for name, folder in text_folders(models).items()}
        _check_any_served(models, self.texts)
        self.host = HostConfig({text.name: text.folder for text in _loaded(self.texts)})
        self._withheld = key_variables(models)
        self._num_loaded = 0
        self._load = load
        self._make = make

    async def prepare(self, models: Sequence[ModelConfig], max_workers: int, in_use: Collection[LoadedText]) -> TextChange:
        """Nothing changes before `apply`. in_use: texts of running requests, which the next workers must have as well. Raises
        CheckpointError for a working model that would fail now, and when no model could be served.
        """
        texts: ModelTexts = {model.name: await self._text(model) for model in models if model.folder}
        needed = {text.name: text.folder for text in (*in_use, *_loaded(texts))}
        withheld = self._withheld | key_variables(models)
        is_loaded = needed.items() <= self.host.models.items() and not needed.keys() & self.pool.failures.keys()
        if is_loaded and withheld == self._withheld and max_workers == self.pool.max_workers:
            _check_any_served(models, texts)
            return TextChange(texts, self.host, withheld, None, max_workers)
        workers = self._make(HostConfig(needed), withheld)
        try:
            await workers.start()
            texts = {name: self._in_workers(name, text, workers) for name, text in texts.items()}
            _check_any_served(models, texts)
        except BaseException:
            await workers.close()
            raise
        host = HostConfig({name: folder for name, folder in needed.items() if name not in workers.failures})
        return TextChange(texts, host, withheld, workers, max_workers)

    def apply(self, change: TextChange) -> None:
        self.texts = dict(change.texts)
        self.host, self._withheld = change.host, change.withheld
        if change.workers is not None:
            self.pool.replace(change.workers, max_workers=change.max_workers)

    async def _text(self, model: ModelConfig) -> LoadedText | FailedText:
        """Raises CheckpointError if a working model fails."""
        known = self.texts.get(model.name)
        if known is not None and known.folder == model.folder and (isinstance(known, LoadedText) or not model.replicas):
            return known
        self._num_loaded += 1
        name = model.name if model.name not in self.host.models else f"{model.name} ({self._num_loaded})"
        try:
            text: TextModel | CheckpointError = await asyncio.to_thread(self._load, model.folder)
        except CheckpointError as error:
            if isinstance(known, LoadedText):
                raise
            text = error
        if isinstance(known, LoadedText) and isinstance(text, TextModel) and text.digests == known.model.digests != {}:
            return replace(known, folder=model.folder)
        return _text_of(name, model.folder, text)

    def _in_workers(self, model: str, text: LoadedText | FailedText, workers: Workers) -> LoadedText | FailedText:
        """Raises CheckpointError if the model works at present and `workers` could not load it."""
        if isinstance(text, FailedText) or (error := workers.failures.get(text.name)) is None:
            return text
        if isinstance(known := self.texts.get(model), LoadedText) and known.name not in self.pool.failures:
            raise _named(model, error)
        return _text_of(model, text.folder, error)


def _text_of(name: str, folder: str, text: TextModel | CheckpointError) -> LoadedText | FailedText:
    if isinstance(text, CheckpointError):
        log.error("%s is not served until a reload: %s", name, text)
        return FailedText(folder, text)
    return LoadedText(name, folder, text)


def _loaded(texts: ModelTexts) -> list[LoadedText]:
    return [text for text in texts.values() if isinstance(text, LoadedText)]


def _check_any_served(models: Sequence[ModelConfig], texts: ModelTexts) -> None:
    """Raises the first model's CheckpointError when no model can be served."""
    failed = [(name, text.error) for name, text in texts.items() if isinstance(text, FailedText)]
    if failed and len(failed) == len(models) and not any(model.upstreams for model in models):
        raise _named(*failed[0])


def _named(model: str, error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"{model}/{error.file}", error.reason, error.remedy)
