"""Resident memory of a gateway whose clients ask for much and read nothing: bounded while they stay, given back once they left.

A small storm of `bench/storms/memory_unread.py`, against a gateway in a process of its own and a fake engine on the real wire.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import post
from gateway_processes import Site, site
from wire_kit import socket_dir

NUM_CLIENTS = 24
PROMPT = [40 + i % 50 for i in range(1500)]
ECHO = {"prompt": PROMPT, "echo": True, "logprobs": 20, "n": 24, "max_tokens": 8, "stream": True}
CHOICES = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 20, "n": 64, "max_tokens": 48}
STORM_S, CALM_S, GIVEN_BACK_S = 6.0, 1.5, 10.0
"""A storm lasts STORM_S at most, and ends when its peak, once above MIN_OVER_IDLE, has not risen for CALM_S. Memory is given back within
GIVEN_BACK_S."""
MIN_OVER_IDLE, MAX_OVER_IDLE, MAX_KEPT = 4 << 20, 52_000_000, 16_000_000
"""Bytes. Log-probabilities as objects: 174 and 173 million for echoed prompts, 60 to 78 and 48 to 86 for choices. As columns: 19 and 5, 16
to 26 and 5."""


@pytest.fixture(scope="module")
def quiet_site(text_folder: Path) -> Iterator[Site]:
    engine = {"max_model_len": 2048, "num_kv_blocks": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    with socket_dir() as folder, site(folder, text_folder, {"vocab_size": 345, "step_seconds": 0.002}, engine=engine) as made:
        yield made


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def peak_bytes(pid: int, idle: int) -> int:
    """The most that the process holds during a storm. idle: what it held before"""
    peak = idle
    began = risen = time.monotonic()
    while (now := time.monotonic()) < began + STORM_S and (peak - idle <= MIN_OVER_IDLE or now < risen + CALM_S):
        if (held := resident_bytes(pid)) > peak:
            peak, risen = held, now
        time.sleep(0.02)
    return peak


def unread(stack: ExitStack, port: int, request: bytes) -> None:
    """A client that asks and never reads; its kernel takes a few kilobytes for it."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ECHO), ("/v1/chat/completions", {**CHOICES, "ignore_eos": True})])
def test_a_storm_of_unread_log_probabilities_is_bounded_and_given_back(quiet_site: Site, path: str, body: dict[str, Any]) -> None:
    request, pid, port = post(path, {"model": "fox", **body}), quiet_site.gateway.process.pid, int(quiet_site.url.rsplit(":")[-1])
    with quiet_site.client() as client:
        assert client.post(path, json={"model": "fox", **body, "n": 2}).status_code == 200  # what is loaded and made once
    time.sleep(1.5)
    idle = resident_bytes(pid)
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            unread(stack, port, request)
        peak = peak_bytes(pid, idle)
    assert peak - idle > MIN_OVER_IDLE, "nothing was let in: a storm of refusals shows nothing"
    assert peak - idle < MAX_OVER_IDLE
    given_back_by = time.monotonic() + GIVEN_BACK_S
    while (kept := resident_bytes(pid)) - idle >= MAX_KEPT and time.monotonic() < given_back_by:
        time.sleep(0.1)
    assert kept - idle < MAX_KEPT
