"""The GPUs that engines here may use, found without torch, so that commands can choose a device before they start an engine.

The driver is asked in a process of its own: it would keep memory of the process that asks it. Whether a kernel runs, `tensor.backends`
tries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIN_CAPABILITY = (8, 0)
"""Compute capability (major, minor) of the oldest GPUs that the kernels are compiled for: Ampere's."""
PROBE_S = 30.0
"""A first process on a machine without a persistence daemon waits some for the driver."""
_PROBE = """
import ctypes, sys
cuda, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
def ask(function, *arguments):
    if status := function(ctypes.byref(number), *arguments):
        leave(status)
    return number.value
def leave(status):
    print("status", status)
    sys.exit()
version = ask(cuda.cuDriverGetVersion)
status = cuda.cuInit(0)
if status not in (0, 100):
    leave(status)
devices = [ask(cuda.cuDeviceGet, index) for index in range(0 if status else ask(cuda.cuDeviceGetCount))]
print(version, *(".".join(str(ask(cuda.cuDeviceGetAttribute, part, device)) for part in (75, 76)) for device in devices))
"""
"""Prints the CUDA version that the driver is for, 1000 * major + 10 * minor, and each GPU's compute capability: attributes 75 and 76.
Status 100: there is no GPU."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """
    names    as in `CUDA_VISIBLE_DEVICES`
    problem  why existing GPUs cannot be used
    """

    names: tuple[str, ...] = ()
    problem: str = ""
    remedy: str = ""


def unusable(problem: str, remedy: str) -> Gpus:
    """remedy: what to do, without a full stop; using the CPU is added as an alternative."""
    return Gpus(problem=problem, remedy=f"{remedy}, or use device = cpu.")


@cache
def find_gpus() -> Gpus:
    visible = os.environ.get(VISIBLE)
    if visible == "" or not Path("/dev/nvidiactl").exists():
        return Gpus()
    return _missing_software() or _missing_compiler(os.environ) or parse_probe(*run_probe(_PROBE, PROBE_S), visible, _torch_cuda() or "")


def deal_gpu(names: Sequence[str], index: int, total: int) -> tuple[str, int]:
    """(the GPU of one of `total` processes, to which they are dealt in turn; how many others are on it)"""
    number = index % len(names)
    return names[number], (total - 1 - number) // len(names)


def parse_probe(output: str, error: str, visible: str | None, torch_cuda: str = "") -> Gpus:
    """
    visible     value of `CUDA_VISIBLE_DEVICES`; None: it is not set
    torch_cuda  CUDA version of the installed torch; "": not known
    """
    if not re.fullmatch(r"\d+( \d+\.\d+)*", output):
        return unusable(f"the driver does not answer ({output or error or 'no output'})", "Mend the driver (nvidia-smi shows its state)")
    version, *answers = output.split()
    major = int(version) // 1000
    if torch_cuda and major < int(torch_cuda.partition(".")[0]):
        problem = f"the driver is for CUDA {major}.{int(version) % 1000 // 10}, older than the CUDA {torch_cuda} of this torch"
        return unusable(problem, f"Update the driver, install a torch for CUDA {major}")
    if not answers:
        return unusable("the driver finds no GPU", f"Look at {VISIBLE} and nvidia-smi")
    capabilities = [(int(major), int(minor)) for major, minor in (answer.split(".") for answer in answers)]
    names = visible.split(",") if visible else map(str, range(len(answers)))
    usable = tuple(name for name, capability in zip(names, capabilities, strict=False) if capability >= MIN_CAPABILITY)
    return Gpus(usable) if usable else too_old(max(capabilities))


def too_old(capability: tuple[int, int]) -> Gpus:
    found, least = (".".join(map(str, numbers)) for numbers in (capability, MIN_CAPABILITY))
    return unusable(f"the GPU has compute capability {found}, and the kernels need {least}", "Use a card of the Ampere generation or newer")


def run_probe(code: str, timeout_s: float, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Returns the output of the new process and the last line of its errors, both stripped."""
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"no answer within {timeout_s:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    ended = f"its process ended with {done.returncode}" if done.returncode else ""
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2] or ended


def _missing_software() -> Gpus | None:
    if find_spec("torch") is None:
        return unusable("torch is not installed", "Install a torch with CUDA")
    if _torch_cuda() is None:
        return unusable("this torch is a build without CUDA", "Install a torch with CUDA")
    return None if find_spec("triton") else unusable("triton is not installed", "Install it (pip install 'headrace[gpu]')")


def _torch_cuda() -> str | None:
    """CUDA version that the installed torch is built for, such as "13.0". None: a build without CUDA; "": not known.

    Read from torch's version file, because importing torch takes seconds.
    """
    torch = find_spec("torch")
    version = None if torch is None or torch.origin is None else Path(torch.origin).with_name("version.py")
    if version is None or not version.is_file():
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*(None|'[\d.]+')", version.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        return ""
    return None if found[1] == "None" else found[1].strip("'")


def _missing_compiler(environ: Mapping[str, str]) -> Gpus | None:
    """Triton needs a C compiler for the launchers of its kernels. None: all is there."""
    given = environ.get("CC")
    if given is not None and shutil.which(given) is None:
        return unusable(f"Triton compiles with CC, and {given!r} is not found", "Mend or unset CC")
    if given is None and not (shutil.which("gcc") or shutil.which("clang")):
        return unusable("Triton needs a C compiler, and finds neither gcc nor clang", "Install one, or name one in CC")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = sysconfig.get_path("include", scheme)
    searched = [include, *environ.get("CPATH", "").split(":"), *environ.get("C_INCLUDE_PATH", "").split(":")]
    if any(folder and (Path(folder) / "Python.h").is_file() for folder in searched):
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return unusable(f"Triton needs Python's headers, and {include} has no Python.h", f"Install them ({package} on Debian)")
