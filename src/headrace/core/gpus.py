"""The GPUs that engines here may use, found without torch, so that commands can choose a device before they start an engine.

A machine without the kernel's device files has none, which costs one look. Elsewhere the driver is asked in a process of its own: it would
keep memory of the process that asks it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that says which GPUs a process sees, as indices or names, with commas."""
PROBE_S = 30.0
"""Seconds that the driver has to answer. A first process on a machine without a persistence daemon waits some for it."""
_PROBE = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(f"status {status}" if status else count.value)
"""


@dataclass(frozen=True, slots=True)
class Gpus:
    """names: as `CUDA_VISIBLE_DEVICES` takes them, those that engines may use. problem: why GPUs that are here cannot be used; "": none."""

    names: tuple[str, ...] = ()
    problem: str = ""


@cache
def find_gpus() -> Gpus:
    """The GPUs of this machine and process environment. The answer does not change while the process runs."""
    visible = os.environ.get(VISIBLE)
    if visible == "" or not Path("/dev/nvidiactl").exists():
        return Gpus()
    missing = _missing_software()
    if missing:
        return Gpus(problem=missing)
    return parse_probe(*_ask_driver(), visible)


def parse_probe(output: str, error: str, visible: str | None) -> Gpus:
    """What the probe's process printed, as GPUs. visible: value of `CUDA_VISIBLE_DEVICES`; None: it is not set."""
    if not output.isdecimal():
        return Gpus(problem=f"the driver does not answer ({output or error or 'no output'})")
    count = int(output)
    if count == 0:
        return Gpus(problem="the driver finds no GPU")
    return Gpus(tuple(visible.split(",")[:count]) if visible else tuple(map(str, range(count))))


def _missing_software() -> str:
    """What engines need and is not installed, in words; "" where all is there. torch is not imported: its version file is read."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    version = Path(torch.origin).with_name("version.py")
    if version.is_file() and re.search(r"^cuda\b[^=]*=\s*None", version.read_text(encoding="utf-8"), re.MULTILINE):
        return "this torch is a build without CUDA"
    return "" if find_spec("triton") else "triton is not installed"


def _ask_driver() -> tuple[str, str]:
    """(what the probe printed, the last line of its errors), both without space around."""
    try:
        done = subprocess.run([sys.executable, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]
