"""Records the environment of a measurement: commit, machine, load, read bandwidth."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.machine.resources import num_allowed_cpus

PACKAGES = ("headrace", "torch", "numpy", "numba", "aiohttp")
BANDWIDTH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """command       the command line, without API keys"""

    time: str
    commit: str | None
    cpu: str
    num_cpus: int
    load_average: tuple[float, ...]
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


def environment() -> Environment:
    return Environment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit_of(Path(__file__).parent),
        cpu=_cpu_model(),
        num_cpus=num_allowed_cpus(),
        load_average=os.getloadavg(),
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := _version(name))},
        command=(*_program(), *_without_secrets(sys.argv[1:])),
    )


def _program() -> tuple[str, ...]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return (Path(sys.argv[0]).name,)
    return "python", "-m", str(spec.name).removesuffix(".__main__")


def commit_of(folder: Path) -> str | None:
    """The commit, with "+" appended if tracked files differ, results excepted."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
    return commit + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def bandwidth_script() -> Path | None:
    script = Path(__file__).resolve().parents[3] / "bench" / "bandwidth.py"
    return script if script.is_file() else None


class BandwidthUnknown(HeadraceError):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """The rate of all threads together. pattern: the fastest way to read that was tried"""

    bytes_per_s: float
    pattern: str


def bandwidth_facts(bandwidth: ReadBandwidth | None) -> dict[str, object]:
    return {"read_bandwidth_bytes_per_s": bandwidth and bandwidth.bytes_per_s, "read_bandwidth_pattern": bandwidth and bandwidth.pattern}


def read_bandwidth(script: Path | None) -> ReadBandwidth:
    """Raises BandwidthUnknown."""
    if script is None:
        raise BandwidthUnknown("an installed package has no bench/bandwidth.py; run from a checkout")
    command = [sys.executable, str(script), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BANDWIDTH_TIMEOUT_S, check=True)
        printed = json.loads(done.stdout.splitlines()[-1])
        return ReadBandwidth(float(printed["read_bytes_per_s"]), str(printed["pattern"]))
    except subprocess.CalledProcessError as error:
        last_words = (error.stderr or "").strip().splitlines()[-1:]
        raise BandwidthUnknown(": ".join([f"{script.name} ended with status {error.returncode}", *last_words])) from error
    except subprocess.TimeoutExpired as error:
        raise BandwidthUnknown(f"{script.name} took more than {BANDWIDTH_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise BandwidthUnknown(f"{script.name} cannot be run: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BandwidthUnknown(f"{script.name} printed something else than its figures") from error


def measure_bandwidth(script: Path | None) -> ReadBandwidth | None:
    try:
        return read_bandwidth(script)
    except BandwidthUnknown:
        return None


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _without_secrets(arguments: list[str]) -> list[str]:
    shown = []
    hide = False
    for word in arguments:
        shown.append("***" if hide else re.sub(r"^(--api-key=).*", r"\1***", word))
        hide = word == "--api-key"
    return shown
