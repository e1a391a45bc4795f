"""Chooses the directory in which compiled kernels are stored.

Numba's cache is pickled machine code: write access to its directory is enough to run code as this user (`host.cache_folder`). Without a
private directory, kernels are compiled again in every process.

There is one directory per (kernel sources, numba, llvmlite, Python, CPU): Numba itself notices a changed file but not a changed helper in
another file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.tensor.host.cache_folder import ENVIRONMENT, cache_root, open_private

KERNEL_SOURCES = Path(__file__).parents[2]
"""`tensor/kernels`: a change in any of its files may change the machine code."""


@dataclass(frozen=True, slots=True)
class CompileCache:
    """directory  None: kernels are compiled in memory only
    reason     one sentence, for people
    """

    directory: Path | None
    reason: str


def code_key(sources: Path, cpu: str) -> str:
    """A name for everything that compiled code depends on; sources: the folder of kernel files, searched with its subfolders."""
    digest = hashlib.sha256(cpu.encode())
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (sys.version, platform.machine(), *_versions()):
        digest.update(text.encode() + b"\0")
    return f"{cpu.partition(' ')[0]}-{digest.hexdigest()[:16]}"


def _versions() -> tuple[str, str]:
    import llvmlite
    import numba

    return numba.__version__, llvmlite.__version__


def _host_cpu() -> str:
    import llvmlite.binding
    from numba import config

    features = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    return f"{config.CPU_NAME or llvmlite.binding.get_host_cpu_name()} {features}"


def choose_cache(root: Path, key: str) -> CompileCache:
    try:
        directory = open_private(root, ("numba", key))
    except OSError as error:
        return CompileCache(None, f"kernels are compiled at every start: {error}; set {ENVIRONMENT} to a private folder")
    return CompileCache(directory, f"compiled kernels are kept in {directory}")


def numba_cache() -> CompileCache:
    return choose_cache(cache_root(os.environ), code_key(KERNEL_SOURCES, _host_cpu()))
