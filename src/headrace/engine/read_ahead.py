"""Reads, in a thread, the weights that an earlier start packed, while torch is still being imported. Reading needs no torch.

The format of the files and of the notes that name them: `tensor.packed.file`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.machine.cpus import allowed_cpus
from headrace.machine.memory import read_available
from headrace.tensor.host.cache_folder import packed_directory
from headrace.tensor.packed.file import PackedFolder

MAX_MEMORY_SHARE = 0.5
"""The most of the free memory that is read into before it is known whether the configuration can run at all."""


@contextmanager
def reading_ahead(config: EngineConfig) -> Iterator[PackedFolder | None]:
    """`read_ahead` for the duration of a start. Afterwards what the start did not open is dropped, also when the start failed."""
    folder = read_ahead(config)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.drop()


def read_ahead(config: EngineConfig) -> PackedFolder | None:
    """Begin to read this configuration's packed weights. Returns their folder; None if none are kept."""
    if config.device != "cpu" or config.load_format == "dummy" or config.kernels == "reference":
        return None
    directory = packed_directory()
    if directory is None:
        return None
    asked = {name: getattr(config, name) for name in ("quantization", "dtype", "kernels", "deterministic", "num_threads")}
    folder = PackedFolder(directory, {"model": str(Path(config.model).resolve()), "num_cpus": len(allowed_cpus() or ()), **asked})
    folder.read_ahead(int(MAX_MEMORY_SHARE * read_available().num_bytes))
    return folder
