"""Runs this folder's tests of a GPU without one: Triton's interpreter is chosen when triton is imported, so it has processes of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.process


@pytest.mark.timeout(900)
def test_every_kernel_equals_the_reference_under_the_interpreter() -> None:
    shared_out = ("-n", "2", "--dist", "worksteal")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shared_out, "-m", "gpu", str(Path(__file__).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 60, done.stdout[-1000:]
