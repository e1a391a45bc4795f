"""Gives the memory of an idle engine back to the system, and takes it again, at the same addresses: recorded launches hold them."""

from __future__ import annotations

import logging
import time

import torch

from headrace.core.errors import CheckpointError, ConfigError, EngineFatal
from headrace.core.sleep import SleepLevel
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import describe_bytes
from headrace.machine.resources import trim_heap
from headrace.tensor.batch import KvCache
from headrace.tensor.host.file_memory import StoredMemory, give_back
from headrace.tensor.host.pages import bytes_of
from headrace.tensor.models import LoadedModel

log = logging.getLogger(__name__)


class RunnerMemory:
    """Called between steps alone."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, kv: KvCache) -> None:
        self._config, self._loaded, self._kv = config, loaded, kv
        self._dropped: StoredMemory | None = None

    def sleep(self, level: SleepLevel) -> None:
        """Raises ConfigError, with nothing changed."""
        self._check()
        dropped = self._stored() if level is SleepLevel.DISK and self._dropped is None else self._dropped
        self._loaded.model.forget_steps()
        for pool in self._kv.pools:
            give_back(bytes_of(pool))
        if dropped is not None and self._dropped is None:
            dropped.give_back()
        self._dropped = dropped
        trim_heap()
        log.info("asleep (%s): %s of weights are dropped", level, describe_bytes(0 if dropped is None else dropped.num_bytes))

    def wake(self) -> None:
        """Raises EngineFatal where weights cannot be read again."""
        dropped, self._dropped = self._dropped, None
        began = time.perf_counter()
        if dropped is not None:
            try:
                dropped.read(torch.get_num_threads() - 1)
            except OSError as error:
                raise EngineFatal(f"packed weights cannot be read again ({error})") from error
        log.info("awake after %.3f s", time.perf_counter() - began)

    def _check(self) -> None:
        config = self._config
        if config.device != "cpu":
            raise ConfigError("sleep", f"captured steps of a {config.device} engine hold its memory", "Scale the model down instead.")
        if config.parallelism.world > 1:
            raise ConfigError("sleep", "a replica of several ranks does not sleep", "Scale the model down instead.")
        if config.speculative_config is not None and config.speculative_config.model:
            raise ConfigError("sleep", "an engine with a draft model does not sleep", "Use the method ngram or suffix.")

    def _stored(self) -> StoredMemory:
        try:
            stored = None if self._loaded.store is None else self._loaded.store.stored()
        except (OSError, CheckpointError) as error:
            raise ConfigError("level", f"the packed weights cannot be opened ({error})", "Use the level ram.") from error
        if stored is None:
            reason = "the packed weights of this engine are not on disk, or not yet"
            raise ConfigError("level", reason, "Use the level ram, or try again once the log says that they are written.")
        return stored
