"""Writes the lists of packages, with their hashes, that the image of deploy/docker installs.

python tools/lock_image.py TORCH_WHEEL     where uv is installed; the wheel is torch's for CPUs, whose hash no index of PyPI has
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "docker"
EXTRAS = ("redis", "kafka", "registry")
CUDA = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)==")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEADER = "# By tools/lock_image.py, for CPython 3.11 on x86-64 Linux.\n"


def packages_of(extras: tuple[str, ...]) -> list[str]:
    command = ["uv", "pip", "compile", "-q", "pyproject.toml", "-c", "constraints.txt", "--python-version", "3.11", "--generate-hashes"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--no-annotate", "--no-header", "--no-emit-index-url"]
    command += [word for extra in extras for word in ("--extra", extra)]
    text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.findall(r"^\S.*(?:\n .*)*\n", text, flags=re.MULTILINE)


def main() -> None:
    wheel = Path(sys.argv[1])
    packages = packages_of(EXTRAS)
    version = wheel.name.split("-")[1].partition("+")[0]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    written = {
        "requirements.txt": "".join(each for each in packages if not CUDA.match(each)),
        "torch-cpu.txt": f"--index-url {CPU_INDEX}\ntorch=={version} \\\n    --hash=sha256:{digest}\n",
        "torch-gpu.txt": "".join(each for each in packages if CUDA.match(each)),
        "ray.txt": "".join(each for each in packages_of((*EXTRAS, "ray")) if each not in packages),
    }
    for name, lines in written.items():
        (FOLDER / name).write_text(HEADER + lines, encoding="utf-8")


if __name__ == "__main__":
    main()
