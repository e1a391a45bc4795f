"""Tests real servers behind a model of ours, beside a model with an engine of our own: the `openai` client asks all of them.

One foreign server is a second `headrace serve`. Another is llama.cpp's, where it is at hand: HEADRACE_TEST_LLAMA_SERVER names the program
`llama-server`, HEADRACE_TEST_GGUF a model for it that is small enough to load in a minute. Any further one that runs already, such as
vLLM's, is tried where HEADRACE_TEST_FOREIGN_URL says (up to /v1) and HEADRACE_TEST_FOREIGN_MODEL names its model.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionUserMessageParam
from server_kit import KEY, Server, serving

from headrace.bundled import DEFAULT_MODEL, bundled_path

pytestmark = pytest.mark.process

ENGINE: dict[str, object] = {"dtype": "float32", "num_threads": 1, "num_kv_blocks": 64}
MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = 8
ATTEMPTS = "headrace_upstream_attempts_total"
OUR_CONTEXT = 1008
"""Tokens that fit into the KV blocks of ENGINE but one, which is the pad block."""
LLAMA_SERVER, GGUF = (os.environ.get(name, "") for name in ("HEADRACE_TEST_LLAMA_SERVER", "HEADRACE_TEST_GGUF"))
URL, URL_MODEL = (os.environ.get(name, "") for name in ("HEADRACE_TEST_FOREIGN_URL", "HEADRACE_TEST_FOREIGN_MODEL"))
CONTEXT = 256
"""Tokens of a sequence in llama-server: half of `-c` for each of two slots."""


@contextmanager
def front(*upstreams: dict[str, object]) -> Iterator[tuple[Server, OpenAI]]:
    """A gateway with an engine of its own, "near", and "far", which these servers answer for in this order."""
    far = [{**upstream, "order": order} for order, upstream in enumerate(upstreams)]
    config = {
        "models": [{"name": "near", "engine": {**ENGINE, "model": DEFAULT_MODEL}}, {"name": "far", "upstreams": far}],
        "gateway": {"api_keys": [{"key": KEY}], "request_log": "off"},
    }
    with serving(config) as server, open_client(server.port) as client:
        yield server, client


def open_client(port: int) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60.0)


@contextmanager
def another() -> Iterator[Server]:
    with serving(
        {"models": [{"name": "its-name", "engine": {**ENGINE, "model": DEFAULT_MODEL}}], "gateway": {"request_log": "off"}}
    ) as server:
        yield server


def ask(client: OpenAI, model: str = "far", **more: Any) -> str:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, **{"max_tokens": COUNT, **more})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.completion_tokens > 0
    content: str | None = answer.choices[0].message.content
    assert content
    return content


def streamed(client: OpenAI, **more: Any) -> tuple[str, int]:
    chunks = client.chat.completions.create(
        model="far", messages=MESSAGES, temperature=0, max_tokens=COUNT, stream=True, stream_options={"include_usage": True}, **more
    )
    *texts, last = list(chunks)
    assert last.usage is not None
    return "".join([chunk.choices[0].delta.content or "" for chunk in texts]), last.usage.completion_tokens


def broken_stream(client: OpenAI, kill: Any) -> openai.APIError:
    """The error of a stream whose server is killed after its first token."""
    stream = client.chat.completions.create(model="far", messages=MESSAGES, max_tokens=200, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    kill()
    with pytest.raises(openai.APIError) as broken:
        for _ in stream:
            pass
    return broken.value


@pytest.mark.slow
def test_a_server_of_ours_answers_as_an_engine_does_and_its_end_is_a_retryable_error_and_then_the_next_servers_turn() -> None:
    with another() as first, another() as second:
        upstreams: list[dict[str, object]] = [
            {"url": f"http://127.0.0.1:{server.port}/v1", "model": "its-name"} for server in (first, second)
        ]
        with front(*upstreams) as (server, client):
            expected = ask(client, "near")
            assert ask(client) == expected
            assert streamed(client)[0] == expected
            assert {card.id: getattr(card, "max_model_len", None) for card in client.models.list()}["far"] == OUR_CONTEXT
            error = broken_stream(client, first.kill)
            assert "sent again" in str(error)
            assert ask(client) == expected
            assert ask(client, "near") == expected
            status, state = server.get("/ready")
            assert (status, [each["ok"] for each in state["replicas"] if each["model"] == "far"]) == (200, [False, True])
            assert server.metric(ATTEMPTS, model="far", replica="foreign-1", result="ok") == 1


# --------------------------------------------------------------------------------------------------------------------------- llama.cpp


class LlamaServer:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        template = (bundled_path(DEFAULT_MODEL) or Path()) / "chat_template.jinja"
        command = [LLAMA_SERVER, "-m", GGUF, "--host", "127.0.0.1", "--port", str(self.port), "-c", str(2 * CONTEXT), "-np", "2", "-t", "1"]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--metrics", "--alias", "gguf", "--chat-template-file", str(template)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        with open_client(self.port) as client:
            while True:
                assert self.process.poll() is None, "llama-server has ended"
                assert time.monotonic() < deadline
                try:
                    client.chat.completions.create(model="gguf", messages=MESSAGES, max_tokens=1)
                except openai.APIError:
                    time.sleep(0.5)
                else:
                    return

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LlamaServer]:
    if not (LLAMA_SERVER and GGUF):
        pytest.skip("needs HEADRACE_TEST_LLAMA_SERVER and HEADRACE_TEST_GGUF: llama.cpp's server and a model for it")
    server = LlamaServer(tmp_path)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


@pytest.mark.slow
def test_llama_cpp_answers_behind_a_model_of_ours_and_each_of_its_failures_is_ours(llama: LlamaServer) -> None:
    upstream: dict[str, object] = {"url": f"http://127.0.0.1:{llama.port}/v1", "model": "gguf", "silence_s": 3}
    with another() as spare, front(upstream, {"url": f"http://127.0.0.1:{spare.port}/v1", "model": "its-name"}) as (server, client):
        server.until(lambda: server.metric("headrace_upstream_reported_requests", model="far", replica="foreign-0") == 0)
        server.until(lambda: '_reported_requests{model="far",replica="foreign-0",state="waiting"}' in server.get("/metrics")[1])
        expected = ask(client)
        assert streamed(client) == (expected, COUNT)
        assert ask(client, "near") != expected
        assert {card.id: getattr(card, "max_model_len", None) for card in client.models.list()}["far"] == OUR_CONTEXT
        sampled = client.chat.completions.create(
            model="far", messages=MESSAGES, max_tokens=COUNT, seed=7, temperature=0.8, logprobs=True, top_logprobs=2
        )
        assert sampled.choices[0].logprobs is not None
        assert [len(each.top_logprobs) for each in sampled.choices[0].logprobs.content or ()] == [2] * COUNT
        schema = {"type": "object", "properties": {"at": {"enum": ["here"]}}, "required": ["at"], "additionalProperties": False}
        forced = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}}
        assert json.loads(ask(client, extra_body=forced, max_tokens=60)) == {"at": "here"}
        tool: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "look", "parameters": schema}}
        shown = client.chat.completions.create(model="far", messages=MESSAGES, max_tokens=1, tools=[tool])
        assert shown.usage is not None
        assert shown.usage.prompt_tokens > 100, "its template shows the function"

        long: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello " * 260}]
        assert client.chat.completions.create(model="far", messages=long, max_tokens=1).usage, "the spare server has a longer context"
        assert server.metric(ATTEMPTS, model="far", replica="foreign-0", result="overflow") == 1

        error = broken_stream(client, lambda: llama.process.send_signal(signal.SIGSTOP))
        assert "sent again" in str(error)
        assert ask(client) == ask(client, "near"), "silent before its first token: the spare server answers"
        llama.process.send_signal(signal.SIGCONT)
        server.until(lambda: ask(client) == expected)
        llama.kill()
        assert ask(client) == ask(client, "near")
        assert server.get("/ready")[0] == 200


# ------------------------------------------------------------------------------------------------------------------------- any server


@pytest.mark.slow
def test_a_running_server_answers_behind_a_model_of_ours_as_it_does_itself() -> None:
    if not (URL and URL_MODEL):
        pytest.skip("needs HEADRACE_TEST_FOREIGN_URL and HEADRACE_TEST_FOREIGN_MODEL: an OpenAI-compatible server that runs")
    with another() as spare, OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60.0) as direct:
        upstream: dict[str, object] = {"url": URL, "model": URL_MODEL}
        with front(upstream, {"url": f"http://127.0.0.1:{spare.port}/v1", "model": "its-name"}) as (server, client):
            expected = ask(direct, URL_MODEL)
            assert ask(client) == expected
            assert streamed(client) == (expected, COUNT)
            with ThreadPoolExecutor(16) as threads:
                assert list(threads.map(lambda _: ask(client), range(32))) == [expected] * 32
            results = {result: server.metric(ATTEMPTS, model="far", replica="foreign-0", result=result) for result in ("ok", "lost")}
            assert results == {"ok": 34, "lost": 0}
            schema = {"type": "object", "properties": {"at": {"enum": ["here"]}}, "required": ["at"], "additionalProperties": False}
            forced = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}}
            matching = ask(client, extra_body=forced, max_tokens=20)
            assert matching == ask(direct, URL_MODEL, extra_body=forced, max_tokens=20)
            assert matching.lstrip().startswith("{"), "without the schema it would not be JSON"
            limit = next(getattr(card, "max_model_len", None) for card in direct.models.list() if card.id == URL_MODEL)
            if limit is not None:
                long: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello " * limit}]
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(model="far", messages=long, max_tokens=1)
                assert refused.value.code == "context_length_exceeded"
