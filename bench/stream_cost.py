"""Measures what a delivered token costs the gateway: many SSE streams at one token per second each, through one gateway process.

    python -m bench.stream_cost [--streams 1000] [--frames 1] [--seconds 12] [--rounds 1] [--source before=/tree --source after=.]
        -> bench/results/stream-cost/NAME-FRAMES.json for each source; what it has measured before is replaced

The engine (`bench.streams.engine`) is on the real wire and says a known text; one token per second and stream leaves it in `--frames`
frames per second: 1 puts all rows into one frame, the hardest case for delays. The client (`bench.streams.client`) is a process of its own.

cpu_us_per_token  CPU time of all the gateway's threads over tokens received in the same seconds; hardly depends on a busy machine
added_delay_ms    from the engine's handing a token to the wire until the client has read it
lag_ms            how late a timer of one millisecond comes in the gateway's event loop. Depends on the machine's load, like delays
slice_cpu_ms      CPU time of the event loop's thread between two such timers: bounds the longest slice whatever else runs
collections_cpu_ms  generation and CPU time of each garbage collection above 1 ms while slices were looked at
cpu_ms_per_begun_stream  CPU time of everything from the first connection to the second event of the last stream, over the streams
kib_per_stream    growth of the gateway's own memory

Every stream must have got the whole text, or the round counts as failed. Rounds of several sources take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.bundled import DEFAULT_MODEL, FOLDER
from headrace.lab.environment import commit_of, environment
from headrace.lab.report import write_json
from headrace.text.tokenizer import Tokenizer
from headrace.wire.leash import ORPHANED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "stream-cost"
WATCH = Path(__file__).with_name("streams") / "watch"
LOOK, PROFILE, WRITE = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6, signal.SIGRTMIN + 7
SAID = (
    "The headrace is the channel that leads water from a river to the wheel of a mill. Its slope is small, its walls are smooth, and what "
    'it carries arrives without haste: "steady power", as the miller says.\nA gate at its head decides how much of the river it takes. '
)
START_S, WARM_S, SLACK_S = 60.0, 2.0, 3.0
"""Seconds: for a process to start; after all streams have begun; after the last look, before the first stream ends."""


@dataclass(frozen=True, slots=True)
class Load:
    """num_tokens: of each stream, enough for the seconds that are measured, with and without looks, and profiled."""

    num_streams: int
    num_frames: int
    seconds: float
    surface: str
    is_profiled: bool

    @property
    def num_tokens(self) -> int:
        return int(WARM_S + SLACK_S + self.seconds * (3 if self.is_profiled else 2)) + 2


def percentiles(values: Sequence[float], *, scale: float = 1000.0) -> dict[str, float]:
    ranked = sorted(values)
    at = {name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {name: round(scale * value, 3) for name, value in at.items()}


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of another process, to the nanosecond (Linux: the clock of a process id)."""
    return time.clock_gettime((~pid << 3) | 2)


class Round:
    """One gateway, one engine, one client, in a folder of their own."""

    def __init__(self, source: Path, load: Load, folder: Path, stack: ExitStack) -> None:
        self.load = load
        self.folder = folder
        self._source = source
        self._stack = stack
        tokenizer = Tokenizer.load(FOLDER / DEFAULT_MODEL)
        self.said = tokenizer.encode(SAID, add_special_tokens=False)
        self.texts = [tokenizer.token_text(token_id) for token_id in self.said]
        self._write("engine", self._engine_file(tokenizer.vocab_size))
        self._write("gateway", self._gateway_file())

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(data))

    def _engine_file(self, vocab_size: int) -> dict[str, Any]:
        return {
            "address": f"unix:{self.folder}/e0",
            "said": self.said,
            "vocab_size": vocab_size,
            "num_streams": self.load.num_streams,
            "frames_per_second": self.load.num_frames,
            "commits": f"{self.folder}/commits.json",
        }

    def _gateway_file(self) -> dict[str, Any]:
        remote = {"model": str(FOLDER / DEFAULT_MODEL), "replicas": [{"name": "r0", "address": f"unix:{self.folder}/e0"}]}
        return {
            "models": [{"name": "paced", "remote": remote}],
            "gateway": {"port": 0, "request_log": "off"},
        }

    def spawn(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        path = [str(WATCH), str(self._source / "src")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HEADRACE_STREAM_WATCH": f"{self.folder}/watch.json"}
        process = subprocess.Popen([sys.executable, *arguments], env=environ, cwd=self._source, **options)
        self._stack.callback(_end, process)
        return process

    def request(self) -> str:
        body: dict[str, Any] = {"model": "paced", "stream": True, "max_tokens": self.load.num_tokens, "ignore_eos": True, "seed": 1}
        if self.load.surface == "chat":
            path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hello"}]}
        else:
            path, body = "/v1/completions", {**body, "prompt": "Hello"}
        data = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        return f"{head}\r\nconnection: close\r\n\r\n{data}"

    def run(self) -> dict[str, Any]:
        streams = Path(__file__).with_name("streams")
        self.spawn([str(streams / "engine.py"), f"{self.folder}/engine.json"])
        gateway, port = self._gateway()
        self._write("client", {
            "port": port, "request": self.request(), "num_streams": self.load.num_streams, "received": f"{self.folder}/received.json",
        })  # fmt: skip
        idle_bytes, unused = psutil.Process(gateway.pid).memory_full_info().uss, cpu_seconds(gateway.pid)
        client = self.spawn([str(streams / "client.py"), f"{self.folder}/client.json"], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline() == b"begun\n", "the streams did not begin"
        begin_s = cpu_seconds(gateway.pid) - unused
        time.sleep(WARM_S)
        began, used = time.monotonic(), cpu_seconds(gateway.pid)
        threads = thread_seconds(gateway.pid)
        time.sleep(self.load.seconds)
        used, ended = cpu_seconds(gateway.pid) - used, time.monotonic()
        threads = {name: round(seconds - threads.get(name, 0.0), 2) for name, seconds in thread_seconds(gateway.pid).items()}
        grown = psutil.Process(gateway.pid).memory_full_info().uss - idle_bytes
        watched = self._watched(gateway, LOOK)
        looks = watched["looks"]
        stacks = self._watched(gateway, PROFILE)["stacks"] if self.load.is_profiled else {}
        assert client.wait(START_S + self.load.num_tokens) == 0
        delays = self._delays(began, ended)
        found = {
            "cpu_us_per_token": round(1e6 * used / len(delays), 2),
            "cpu_ms_per_begun_stream": round(1000 * begin_s / self.load.num_streams, 3),
            "num_tokens": len(delays),
            "cpu_share": round(used / (ended - began), 4),
            "thread_cpu_seconds": {name: seconds for name, seconds in threads.items() if seconds >= 0.02},
            "added_delay_ms": percentiles(delays),
            "lag_ms": percentiles([late for late, _ in looks]),
            "slice_cpu_ms": percentiles([cpu for _, cpu in looks]),
            "collections_cpu_ms": [[generation, round(1000 * cpu, 2)] for generation, cpu in watched["collections"] if cpu > 0.001],
            "kib_per_stream": round(grown / self.load.num_streams / 1024, 2),
            "load_average": os.getloadavg()[0],
        }
        return found | ({"stacks": stacks} if stacks else {})

    def _gateway(self) -> tuple[subprocess.Popen[bytes], int]:
        log = self.folder / "gateway.log"
        with log.open("wb") as output:
            gateway = self.spawn(["-m", "headrace.cli.main", "gateway", "--config", f"{self.folder}/gateway.json"], stderr=output)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and gateway.poll() is None:
            text = log.read_text()
            if "is connected" in text and (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)):
                return gateway, int(found.group(1))
            time.sleep(0.05)
        raise AssertionError(f"the gateway does not serve: {log.read_text()[-2000:]}")

    def _watched(self, gateway: subprocess.Popen[bytes], what: int) -> dict[str, Any]:
        """What the watch wrote after some seconds of looking."""
        written = self.folder / "watch.json"
        gateway.send_signal(what)
        time.sleep(self.load.seconds)
        gateway.send_signal(WRITE)
        while not written.exists():
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(written.read_text())
        written.unlink()
        return found

    def _delays(self, began: float, ended: float) -> list[float]:
        """Seconds from commit to receipt of every token received in that time. Raises AssertionError for a stream that is not whole."""
        commits = {key.partition("-")[0]: moments for key, moments in json.loads((self.folder / "commits.json").read_text()).items()}
        received = json.loads((self.folder / "received.json").read_text())
        pieces = [self.texts[number % len(self.texts)] for number in range(self.load.num_tokens)]
        ends, length = [], 0
        for piece in pieces:
            length += len(piece)
            ends.append(length)
        delays = []
        for request_id, texts, is_done in received:
            assert is_done, f"{request_id} has no end"
            assert "".join(text for _, text in texts) == "".join(pieces), f"{request_id} is not whole"
            committed = commits[request_id]
            number = have = 0
            for moment, text in texts:
                have += len(text)
                while number < len(ends) and ends[number] <= have:
                    if began <= moment <= ended:
                        delays.append(moment - committed[number])
                    number += 1
        return delays


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds by thread name, in ticks of 10 ms."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread in psutil.Process(pid).threads():
        name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()
        found["event loop" if thread.id == pid else name] += thread.user_time + thread.system_time
    return dict(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
    status = process.wait(START_S)
    assert status != ORPHANED


@contextmanager
def prepared(source: Path, load: Load) -> Iterator[Round]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, ExitStack() as stack:
        yield Round(source, load, Path(folder), stack)


def write_profile(stacks: Mapping[str, int], num_tokens: int, cpu_us: float) -> None:
    """Own and whole time per function, in us per token."""
    total = sum(stacks.values())
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for stack, count in stacks.items():
        names = stack.split(";")
        own[names[-1]] += count
        for name in set(names):
            whole[name] += count
    scale = cpu_us / total
    print(f"{total} samples; us per token: own, with what it calls")
    for name, count in own.most_common(45):
        print(f"{scale * count:7.2f} {scale * whole[name]:7.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=1, help="frames per second; each has a row for 1 / FRAMES of the streams")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--surface", choices=("chat", "completions"), default="chat")
    parser.add_argument("--source", action="append", help="NAME=TREE; default after=<this tree>")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; nothing is written")
    given = parser.parse_args()
    load = Load(given.streams, given.frames, given.seconds, given.surface, given.profile)
    sources = dict(item.split("=", 1) for item in given.source or [f"after={ROOT}"])
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for number in range(given.rounds):
        for name in sorted(sources, reverse=number % 2 == 1):
            with prepared(Path(sources[name]).resolve(), load) as one:
                found = one.run()
            if stacks := found.pop("stacks", None):
                write_profile(stacks, found["num_tokens"], found["cpu_us_per_token"])
            print(name, json.dumps(found), flush=True)
            rounds[name].append(found)
    if not given.profile:
        for name, tree in sources.items():
            write_json(RESULTS / f"{name}-{load.surface}-{load.num_frames}.json", result(load, Path(tree), rounds[name]))


def result(load: Load, tree: Path, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    plain = {
        name: statistics.median(one[name] for one in rounds) for name in ("cpu_us_per_token", "cpu_ms_per_begun_stream", "kib_per_stream")
    }
    spread = {
        name: {at: statistics.median(one[name][at] for one in rounds) for at in ("p50", "p99", "max")}
        for name in ("added_delay_ms", "lag_ms", "slice_cpu_ms")
    }
    return {
        "num_streams": load.num_streams,
        "frames_per_second": load.num_frames,
        "surface": load.surface,
        "commit": commit_of(tree.resolve()),
        "median": plain | spread,
        "rounds": rounds,
        "environment": environment(),
    }


if __name__ == "__main__":
    main()
