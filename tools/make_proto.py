"""Regenerates the message modules of the wire from src/headrace/wire/headrace.proto (`make proto`).

Generated code runs with the protobuf release it was made by and every later one, never with an older one. So it is made by the compiler
of the *oldest* release pyproject.toml allows, which needs a tool environment of its own: build/proto-tools, filled on the first run.
Only messages are generated; services are registered by hand (headrace.wire.service).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIRE = ROOT / "src" / "headrace" / "wire"
TOOLS = ROOT / "build" / "proto-tools"
COMPILER = "grpcio-tools==1.76.0"
"""Emits code for protobuf 6.31.1, the floor in pyproject.toml; raise both together."""


def install_compiler() -> None:
    if (TOOLS / "grpc_tools").is_dir():
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(TOOLS),
        COMPILER,
        "setuptools<81",
    ]
    subprocess.run(command, check=True)


def generate() -> None:
    arguments = [f"-I{WIRE}", f"--python_out={WIRE}", f"--pyi_out={WIRE}", str(WIRE / "headrace.proto")]
    program = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); from grpc_tools.protoc import main; sys.exit(main(['protoc', *sys.argv[1:]]))"
    )
    include = TOOLS / "grpc_tools" / "_proto"
    # -S keeps the project's own protobuf, a newer one, out of the compiler's process.
    subprocess.run([sys.executable, "-S", "-c", program, f"-I{include}", *arguments], check=True)


def check_floor() -> None:
    """Raises SystemExit when the generated code asks for more than pyproject.toml promises."""
    made = re.search(r"Protobuf Python Version: ([\d.]+)", (WIRE / "headrace_pb2.py").read_text())
    floor = re.search(r'"protobuf>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if made is None or floor is None or made.group(1) != floor.group(1):
        raise SystemExit(f"generated for protobuf {made and made.group(1)}, but pyproject.toml allows {floor and floor.group(1)}")


def main() -> None:
    install_compiler()
    generate()
    check_floor()


if __name__ == "__main__":
    main()
