"""Runs tests once more in a process of their own, whose kernels take the paths of another CPU.

Compiling those paths takes most of the time, so the compiled code stays on disk between runs, in a folder whose name depends on the source
of the plugins that switch the paths.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.machine.cache_folder import ENVIRONMENT, cache_root, open_private

ROOT = Path(__file__).resolve().parents[2]


def run_with(plugins: Sequence[str], tests: Sequence[str], *files: Path) -> subprocess.CompletedProcess[str]:
    """The tests of the files whose names fit one of these expressions of pytest's `-k`, under each `tests.support.<plugin>`."""
    version = hashlib.sha256(b"".join((ROOT / "tests" / "support" / f"{plugin}.py").read_bytes() for plugin in plugins)).hexdigest()[:16]
    cache = open_private(cache_root(os.environ), ("tests", f"other-cpu-{version}"))
    planted = [argument for plugin in plugins for argument in ("-p", f"tests.support.{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *planted, "-k", " or ".join(f"({test})" for test in tests), *map(str, files)]
    environment = {**os.environ, ENVIRONMENT: str(cache)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
