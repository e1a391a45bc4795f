"""What of a start needs no torch, done by another thread while torch is imported: reading the weights that the last one packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.cpus import allowed_cpus
from headrace.engine.config import EngineConfig
from headrace.engine.memory import read_available
from headrace.tensor.host.cache_folder import packed_directory
from headrace.tensor.packed.file import PackedFolder

MOST_SHARE = 0.5
"""Of the available memory, taken before it is known whether the configuration can run at all."""


@contextmanager
def reading_ahead(config: EngineConfig) -> Iterator[PackedFolder | None]:
    """`read_ahead` around a start: what was not asked for by its end is dropped, whatever the end is."""
    folder = read_ahead(config)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.drop()


def read_ahead(config: EngineConfig) -> PackedFolder | None:
    """Where this configuration's packed weights are kept, with reading begun; None where none are kept."""
    if config.device != "cpu" or config.load_format == "dummy" or config.kernels == "reference":
        return None
    directory = packed_directory()
    if directory is None:
        return None
    asked = {name: getattr(config, name) for name in ("quantization", "dtype", "kernels", "deterministic", "num_threads")}
    folder = PackedFolder(directory, {"model": str(Path(config.model).resolve()), "num_cpus": len(allowed_cpus() or ()), **asked})
    folder.read_ahead(int(MOST_SHARE * read_available().num_bytes))
    return folder
