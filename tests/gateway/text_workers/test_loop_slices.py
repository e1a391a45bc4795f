"""Tests that no request holds the event loop for long: the longest slice of heavy legal and refused requests, in lines of Python and CPU
time.

The goal is 5 ms on an idle machine; the bounds here are wide, so that only work that grows with a request breaks them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import text_kit
from figures import Figure
from gateway_kit import MODEL, TestBench, model_info, open_bench
from local_workers import LocalWorker
from loop_watch import counted_lines, watched_loop

from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.processes import HostProcess
from headrace.text.folder import TextModel, load_text

MOST_LINES = 60_000
"""Lines of Python in one slice, some 5 ms. Of a request of 140,000 ids each pass over them is more."""

SLICE_MS = 8.0
HEAVY: dict[str, Any] = {
    "n": 64,
    "stop": [f"{number:02}" + "x" * 1022 for number in range(16)],
    "logit_bias": {str(number): 1.0 for number in range(300)},
    "max_tokens": 4,
}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MESSAGE = {"role": "user", "content": "Hello"}
CASES: dict[str, tuple[str, bytes, int]] = {
    "a chat with everything": (CHAT, body(messages=[MESSAGE], **HEAVY), 200),
    "64 prompts with everything": (COMPLETIONS, body(prompt=["Hello"] * 64, **{**HEAVY, "n": 2}), 200),
    "a megabyte of text": (COMPLETIONS, body(prompt="x " * 500_000), 400),
    "a megabyte of chat": (CHAT, body(messages=[{"role": "user", "content": "fox " * 250_000}]), 400),
    "a megabyte of control tokens": (CHAT, body(messages=[{"role": "user", "content": "<|im_end|>" * 100_000}]), 400),
    "a megabyte of two-byte letters": (COMPLETIONS, body(prompt="\u00e9" * 170_000), 400),
    "1,024 messages": (CHAT, body(messages=[MESSAGE] * 1024), 400),
    "140,000 ids": (COMPLETIONS, body(prompt=[5] * 140_000), 400),
    "140,000 ids and an odd one": (COMPLETIONS, body(prompt=[5] * 140_000 + [True]), 400),
    "140,000 empty lists": (COMPLETIONS, body(prompt=[[]] * 140_000), 400),
    "a megabyte to tokenize": (TOKENIZE, body(prompt="x " * 500_000), 200),
    "140,000 ids to decode": (DETOKENIZE, body(tokens=[70] * 140_000), 200),
    "140,000 ids to decode, one of them wrong": (DETOKENIZE, body(tokens=[70] * 139_999 + [2**40]), 400),
}

FIRST = [
    (CHAT, body(messages=[MESSAGE], **HEAVY)),
    (COMPLETIONS, body(prompt="x")),
    (TOKENIZE, body(prompt="x")),
    (DETOKENIZE, body(tokens=[70])),
]


@pytest.fixture(params=["spaces count", "spaces are swallowed"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    made = text_kit.save_byte_level(tmp_path / "m")
    if request.param == "spaces are swallowed":
        text_kit.let_tokens_swallow_spaces(made)
    return made


def let_contexts_be_long(bench: TestBench) -> None:
    replica = bench.replica
    assert replica.info is not None
    longer = model_info(replica.text, max_model_len=200_000)
    replica.info = type(replica.info)("instance", "r0", longer)


LONG_PROMPTS = {"a long prompt of ids": [5] * 140_000, "a long prompt of text": "x " * 60_000}


async def post(bench: TestBench, path: str, data: bytes) -> int:
    response = await bench.client.post(path, content=data, headers={"content-type": "application/json"})
    return response.status_code


def is_job(callback: object) -> bool:
    """Whether it is what a text worker's process does in use."""
    return getattr(callback, "__func__", None) is LocalWorker._work


@pytest.mark.loop
async def test_no_request_is_a_slice_of_many_lines(folder: Path) -> None:
    async with open_bench(load_text(folder)) as bench:
        for path, data in FIRST:
            await post(bench, path, data)  # imports and caches are no request's
        for name, (path, data, status) in CASES.items():
            with counted_lines(is_job) as count:
                assert await post(bench, path, data) == status, name
            assert 0 < count.most < MOST_LINES, f"{name}: {count}"
        let_contexts_be_long(bench)
        for name, prompt in LONG_PROMPTS.items():
            with counted_lines(is_job) as count:
                assert await post(bench, COMPLETIONS, body(prompt=prompt, max_tokens=4)) == 200
            assert 0 < count.most < MOST_LINES, f"{name}: {count}"


@pytest.mark.loop
async def test_all_of_them_at_once_are_answered(text: TextModel) -> None:
    async with open_bench(text) as bench:
        statuses = await asyncio.gather(*(post(bench, path, data) for path, data, _ in CASES.values()))
    assert statuses == [status for _, _, status in CASES.values()]


@pytest.mark.process
@pytest.mark.timing
@pytest.mark.usefixtures("frozen_heap")  # or a slice would include the collection of what other tests left
async def test_no_request_holds_the_event_loop(folder: Path, figure: Figure) -> None:
    host = HostProcess(frames.HostConfig({MODEL: str(folder)}))
    async with open_bench(load_text(folder), workers=host) as bench:
        for name, (path, data, status) in CASES.items():
            await post(bench, path, data)
            with watched_loop() as watch:
                assert await post(bench, path, data) == status, name
            figure(f"longest slice of {name}", watch.longest_s * 1e3, SLICE_MS, "ms")
        let_contexts_be_long(bench)
        for name, prompt in LONG_PROMPTS.items():
            with watched_loop() as watch:
                assert await post(bench, COMPLETIONS, body(prompt=prompt, max_tokens=4)) == 200
            figure(f"longest slice of {name}", watch.longest_s * 1e3, SLICE_MS, "ms")
