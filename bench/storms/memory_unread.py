"""Memory of a gateway whose clients do not read: python bench/storms/memory_unread.py LABEL [--small]

Three storms against the bundled model, each with a server of its own: streams of echoed prompts with log-probabilities that nobody reads,
the same read at 4 KB/s, and whole answers of many choices with log-probabilities that nobody reads. Figures: the gateway's resident
memory before, at most, and ten seconds after every client has left. LABEL names the result: bench/results/storms/memory-unread-LABEL.json.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from bench.storms.common import Client, Peak, post, served, statuses, write_result

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


def storm(name: str, path: str, body: dict[str, Any], num_clients: int, seconds: float, *, is_read: bool = False) -> dict[str, Any]:
    with served() as server:
        time.sleep(2)
        peak = Peak(server, server.rss_mb)
        clients: list[Client] = []
        for _ in range(num_clients):
            clients.append(post(server.port, path, body))
            peak.watch(0)
        peak.watch(seconds, partial(trickle, clients) if is_read else None)
        seen = statuses(clients)
        for client in clients:
            client.close()
        time.sleep(10)
        result = {
            "storm": name, "clients": num_clients, "seconds": seconds, "statuses": seen, "idle_mb": peak.idle_mb,
            "peak_mb": peak.peak_mb, "over_idle_mb": round(peak.peak_mb - peak.idle_mb, 1),
            "kept_mb": round(server.rss_mb - peak.idle_mb, 1),
        }  # fmt: skip
        print(result, flush=True)
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("label")
    parser.add_argument("--small", action="store_true", help="a tenth of the clients")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    share = 10 if given.small else 1
    characters = 5900  # about 1,950 tokens
    storms = [
        storm("unread streams", "/v1/completions", echo(characters), 20 // min(share, 2), given.seconds),
        storm("unread streams, many", "/v1/completions", echo(characters), 100 // share, given.seconds),
        storm("streams at 4 KB/s", "/v1/completions", echo(characters), 300 // share, given.seconds, is_read=True),
        storm("unread whole answers", "/v1/chat/completions", choices(), 60 // share, given.seconds),
    ]
    print(write_result(f"memory-unread-{given.label}", {"command": f"memory_unread.py {given.label}", "storms": storms}))


if __name__ == "__main__":
    main()
