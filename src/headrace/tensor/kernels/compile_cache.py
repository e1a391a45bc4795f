"""Where compiled kernels are kept on disk.

Numba's cache is pickled machine code: whoever may write to its directory runs code as us. So the directory belongs to this user, is closed
to everybody else, and is refused otherwise; then kernels are compiled anew in every process, which costs time and nothing else.

One directory per (kernel sources, numba, llvmlite, Python, CPU): Numba itself notices a changed file but not a changed helper
in another file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "HEADRACE_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class CompileCache:
    """directory  None: kernels are compiled in memory only
    reason     one sentence, for people
    """

    directory: Path | None
    reason: str


def cache_root(environ: Mapping[str, str]) -> Path:
    """Headrace's cache directory of this user: HEADRACE_CACHE_DIR, else `headrace` in XDG_CACHE_HOME or ~/.cache."""
    if given := environ.get(ENVIRONMENT):
        return Path(given)
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "headrace"


def code_key(sources: Path, cpu: str) -> str:
    """Names everything compiled code depends on; sources: the folder of kernel files."""
    digest = hashlib.sha256(cpu.encode())
    for path in sorted(sources.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (sys.version, platform.machine(), *_versions()):
        digest.update(text.encode() + b"\0")
    return f"{cpu.partition(' ')[0]}-{digest.hexdigest()[:16]}"


def _versions() -> tuple[str, str]:
    import llvmlite
    import numba

    return numba.__version__, llvmlite.__version__


def _host_cpu() -> str:
    """Name and features of the CPU that Numba compiles for."""
    import llvmlite.binding
    from numba import config

    features = config.CPU_FEATURES or llvmlite.binding.get_host_cpu_features().flatten()
    return f"{config.CPU_NAME or llvmlite.binding.get_host_cpu_name()} {features}"


def open_private(root: Path, parts: tuple[str, ...]) -> Path:
    """Make and check root / parts[0] / ...; every folder from root down must be ours and closed to others' writing.

    Raises: PermissionError naming the folder and what is wrong; OSError where a folder cannot be made.
    """
    path = root
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    for part in parts:
        path = path / part
        path.mkdir(mode=0o700, exist_ok=True)
        _check_private(path)
    path.chmod(0o700)
    return path


def _check_private(path: Path) -> None:
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise PermissionError(f"{path} is not a folder of its own (a link, or a file)")
    if facts.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {facts.st_uid}, not to this one ({os.geteuid()})")
    if facts.st_mode & 0o022:
        raise PermissionError(f"{path} may be written by others (mode {stat.S_IMODE(facts.st_mode):04o})")


def choose_cache(root: Path, key: str) -> CompileCache:
    try:
        directory = open_private(root, ("numba", key))
    except OSError as error:
        return CompileCache(None, f"kernels are compiled at every start: {error}; set {ENVIRONMENT} to a private folder")
    return CompileCache(directory, f"compiled kernels are kept in {directory}")


def numba_cache() -> CompileCache:
    """The cache of this process, from its environment."""
    return choose_cache(cache_root(os.environ), code_key(Path(__file__).parent, _host_cpu()))
