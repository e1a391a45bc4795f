"""Tests of one file once more in a process of their own, whose kernels take the path of another CPU.

Compiling that path takes most of the time, so its code stays on disk between runs, apart from this CPU's own: found by source and CPU, as
the user's kernel cache is, in a folder for the plugin that plants the path, as the plugin is written now.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from headrace.tensor.host.cache_folder import ENVIRONMENT, cache_root, open_private

ROOT = Path(__file__).resolve().parents[2]


def run_with(plugin: str, tests: list[str], file: str) -> subprocess.CompletedProcess[str]:
    """The tests of a file whose names fit one of these expressions of pytest's `-k`, under `tests.support.<plugin>`."""
    version = hashlib.sha256((ROOT / "tests" / "support" / f"{plugin}.py").read_bytes()).hexdigest()[:16]
    cache = open_private(cache_root(os.environ), ("tests", f"{plugin}-{version}"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"tests.support.{plugin}", "-k", " or ".join(tests), file]
    environment = {**os.environ, ENVIRONMENT: str(cache)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
