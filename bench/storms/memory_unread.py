"""Measures the memory of a gateway whose clients do not read.

    python -m bench.storms.memory_unread LABEL [--small] [--watched] -> bench/results/storms/memory-unread-LABEL.json

Three storms run against the bundled model, each with a server of its own: streams of echoed prompts with log-probabilities that no client
reads, the same read at 4 KB/s, and whole answers of many choices with log-probabilities that no client reads. Figures: the gateway's
resident memory before, at most, and ten seconds after every client has left; with --watched, how long its event loop is held.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from bench.storms.common import Client, Peak, Served, post, served, statuses, write_result
from bench.stream_cost import percentiles
from headrace.lab.environment import commit_of, environment

CAPTION = "Times depend on what else the machine did (environment.load_average); processor time and memory do not."

PROMPT = "The quick brown fox jumps over the lazy dog. What is the capital of France? " * 110


def echo(prompt_chars: int) -> dict[str, Any]:
    return {
        "model": "headrace-tiny", "prompt": PROMPT[:prompt_chars], "echo": True, "logprobs": 20, "n": 24,
        "max_tokens": 16, "stream": True,
    }  # fmt: skip


def choices() -> dict[str, Any]:
    return {
        "model": "headrace-tiny", "messages": [{"role": "user", "content": "Tell a long story."}], "logprobs": True,
        "top_logprobs": 20, "n": 64, "max_tokens": 64, "ignore_eos": True,
    }  # fmt: skip


def trickle(clients: list[Client]) -> None:
    """Four times a second: 4 KB/s each."""
    for client in clients:
        client.read(1024)


@dataclass(frozen=True, slots=True)
class Storm:
    name: str
    path: str
    body: dict[str, Any]
    num_clients: int
    is_read: bool = False

    def run(self, seconds: float) -> dict[str, Any]:
        """The gateway's memory."""
        with served() as server:
            time.sleep(2)
            peak = Peak(server, server.rss_mb)
            seen = self._clients(server, seconds, peak)
            time.sleep(10)
            return seen | {
                "idle_mb": peak.idle_mb, "peak_mb": peak.peak_mb, "over_idle_mb": round(peak.peak_mb - peak.idle_mb, 1),
                "kept_mb": round(server.rss_mb - peak.idle_mb, 1),
            }  # fmt: skip

    def run_watched(self, seconds: float) -> dict[str, Any]:
        """How long the gateway's event loop is held: CPU between two looks, a millisecond apart, and how late they come."""
        with tempfile.TemporaryDirectory() as folder, served(watch=Path(folder) / "watch.json") as server:
            time.sleep(2)
            server.watch()
            seen = self._clients(server, seconds, Peak(server, server.rss_mb))
            looks, collections = server.watched(Path(folder) / "watch.json")
            return seen | {
                "slice_cpu_ms": percentiles([cpu for _, cpu in looks]), "lag_ms": percentiles([late for late, _ in looks]),
                "cpu_s": round(sum(cpu for _, cpu in looks), 2),
                "longest_collection_cpu_ms": round(1000 * max(collections, default=0.0), 2),
            }  # fmt: skip

    def _clients(self, server: Served, seconds: float, peak: Peak) -> dict[str, Any]:
        clients: list[Client] = []
        for _ in range(self.num_clients):
            clients.append(post(server.port, self.path, self.body))
            peak.watch(0)
        peak.watch(seconds, partial(trickle, clients) if self.is_read else None)
        seen = statuses(clients)
        for client in clients:
            client.close()
        return {"storm": self.name, "clients": self.num_clients, "seconds": seconds, "statuses": seen}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("label")
    parser.add_argument("--small", action="store_true", help="a tenth of the clients")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--watched", action="store_true", help="how long the event loop is held, instead of memory")
    given = parser.parse_args()
    share = 10 if given.small else 1
    characters = 5900  # about 1,950 tokens
    storms = [
        Storm("unread streams", "/v1/completions", echo(characters), 20 // min(share, 2)),
        Storm("unread streams, many", "/v1/completions", echo(characters), 100 // share),
        Storm("streams at 4 KB/s", "/v1/completions", echo(characters), 300 // share, is_read=True),
        Storm("unread whole answers", "/v1/chat/completions", choices(), 60 // share),
    ]
    found: list[dict[str, Any]] = []
    for storm in storms:
        found.append(storm.run_watched(given.seconds) if given.watched else storm.run(given.seconds))
        print(found[-1], flush=True)
    source = Path(headrace.__file__).parents[2]
    result = {"command": f"memory_unread.py {' '.join(sys.argv[1:])}", "commit": commit_of(source), "environment": environment()}
    print(write_result(f"memory-unread-{given.label}", result | {"caption": CAPTION, "storms": found}))


if __name__ == "__main__":
    main()
