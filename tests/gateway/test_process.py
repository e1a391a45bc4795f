"""The gateway as a process, over the real wire: the official client, hostile bodies, stopped, blocked and killed engines, drain, leash."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from gateway_processes import GATEWAY, Site, child, site, write_gateway_file
from hostile_requests import cases
from lateness import tries_while_late
from wire_kit import socket_dir

from headrace.wire.leash import ORPHANED
from headrace.wire.stop_signals import DUPLICATE_SIGNAL_S

VOCAB = 345
IDLE = ('headrace_requests_running{model="fox",replica="r0"} 0.0', 'headrace_kv_blocks{model="fox",replica="r0",state="used"} 1.0')
PACED = {"vocab_size": VOCAB, "step_seconds": 0.01}


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as path:
        yield path


@pytest.fixture(scope="module")
def shared(text_folder: Path) -> Iterator[Site]:
    """One site for tests that leave it as it was."""
    with socket_dir() as path, site(path, text_folder, {**PACED, "step_seconds": 0.002, "eos_after": 40}) as made:
        yield made


@pytest.fixture(scope="module")
def client(shared: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fox", "messages": [{"role": "user", "content": "Hello"}], **fields}


# -- the official client -----------------------------------------------------------------------------------------------------------


def test_openai_client_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model="fox", messages=messages, max_tokens=8, seed=3, logprobs=True, top_logprobs=2)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 8
    stream = client.chat.completions.create(
        model="fox", messages=messages, max_tokens=8, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_openai_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fox", prompt=["Hello", "Bye"], max_tokens=4, n=2, logprobs=1, echo=True, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text.startswith("Hello")
    assert whole.choices[0].logprobs is not None
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(model="fox", prompt=["Hello", "Bye"], max_tokens=4, n=2, echo=True, seed=1, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]


def test_openai_client_understands_errors(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fox", messages=messages, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError, match="Did you mean"):
        client.chat.completions.create(model="fox", messages=messages, extra_body={"temprature": 1})


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fox"]
    assert client.models.retrieve("fox").id == "fox"


# -- hostile bodies over sockets ---------------------------------------------------------------------------------------------------


def test_hostile_bodies_harm_no_neighbour(shared: Site) -> None:
    """A stream runs while every hostile body is sent; it is what it is without them, and the engine is the same process."""
    asked = chat(stream=True, seed=11, max_tokens=400, ignore_eos=True)
    with shared.client() as quiet:
        alone = quiet.post("/v1/chat/completions", json=asked).text
    with shared.client() as loud, shared.client() as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(lambda: loud.post("/v1/chat/completions", json=asked).text)
        for case in cases("fox"):
            headers = {"content-type": case.content_type} if case.content_type else {}
            response = client.post(case.path, content=case.body, headers=headers)
            assert response.status_code == case.status, case.name
            assert response.json()["error"]["param"] == case.param, case.name
        beside = neighbour.result()
    assert texts(beside) == texts(alone)
    assert shared.engines[0].process.poll() is None
    with shared.client() as client:
        metrics = client.get("/metrics").text
    assert all(line in metrics for line in IDLE)


def texts(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def test_client_that_leaves_frees_its_blocks(shared: Site) -> None:
    with shared.client() as client:
        with opened(client, ignore_eos=True):
            pass
        eventually(lambda: all(line in client.get("/metrics").text for line in IDLE))


def eventually(condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 10
        time.sleep(0.02)


# -- engines that stop, hang and die; gateways that end ----------------------------------------------------------------------------


def test_a_stopped_then_killed_engine(folder: Path, text_folder: Path) -> None:
    """Stopped: not ready within 1 s (the deadline here leaves room for a busy machine). Killed: streams end with a retryable error.

    And when the supervisor goes, so does the gateway.
    """
    with site(folder, text_folder, PACED, timeouts={"failover_s": 0}) as made, made.client() as client:
        for _ in tries_while_late(3):
            made.engines[0].signal(signal.SIGCONT)
            made.wait_until("/ready", 200)
            made.engines[0].signal(signal.SIGSTOP)
            took_s = made.wait_until("/ready", 503)
            if took_s < 2.0:
                break
        assert took_s < 2.0
        assert client.get("/ready").json()["reason"].startswith("fox/r0 ")
        assert client.get("/live").status_code == 200
        refused = client.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        made.engines[0].signal(signal.SIGCONT)
        made.wait_until("/ready", 200)
        with opened(client, ignore_eos=True) as lines:
            made.engines[0].signal(signal.SIGKILL)
            last = list(lines)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
        assert "unix:" not in last
        made.wait_until("/ready", 503)
        made.wait_until("/health", 503)
        refused = client.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        made.gateway.leash.close()
        assert made.gateway.wait() == ORPHANED


def test_a_hanging_step_and_the_end_of_patience(folder: Path, text_folder: Path) -> None:
    """A step that hangs makes /ready false; a drain ends at its timeout: what still runs is told so, and the status says it."""
    fake = {**PACED, "stall_after_steps": 5, "stall_seconds": 3600.0}
    with site(folder, text_folder, fake, timeouts={"drain_s": 0.3}) as made, made.client() as client:
        with opened(client, ignore_eos=True) as lines:
            made.wait_until("/ready", 503)
            with made.client() as other:
                # At first it may be that the machine stood still, and the engine with it: "does not answer".
                eventually(lambda: "a step has taken" in other.get("/ready").json()["reason"])
                assert other.get("/health").status_code == 200
            made.gateway.signal(signal.SIGTERM)
            last = list(lines)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
        assert made.gateway.wait() == 75


def test_a_second_signal_ends_streams_with_an_error_event(folder: Path, text_folder: Path) -> None:
    with site(folder, text_folder, PACED, timeouts={"drain_s": 600}) as made, made.client() as client:
        with opened(client, ignore_eos=True) as lines:
            made.gateway.signal(signal.SIGTERM)
            time.sleep(DUPLICATE_SIGNAL_S + 0.3)
            made.gateway.signal(signal.SIGTERM)
            last = list(lines)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "unavailable")
        assert made.gateway.wait() == 75


def test_one_replica_of_two_serves_on_and_sigterm_drains(folder: Path, text_folder: Path) -> None:
    with site(folder, text_folder, PACED, num_engines=2) as made, made.client() as client, made.client() as other:
        made.engines[0].signal(signal.SIGKILL)
        made.wait_until("/ready?strict", 503)
        assert other.get("/ready").status_code == 200
        for _ in range(5):
            assert other.post("/v1/chat/completions", json=chat(max_tokens=3)).status_code == 200
        assert other.get("/health").status_code == 200
        with opened(client, ignore_eos=True, max_tokens=300) as lines:
            made.gateway.signal(signal.SIGTERM)
            refused = other.post("/v1/chat/completions", json=chat(max_tokens=1))
            while refused.status_code == 200:
                refused = other.post("/v1/chat/completions", json=chat(max_tokens=1))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert list(lines)[-1] == "data: [DONE]"
        assert made.gateway.wait() == 0


def test_replicas_change_through_the_leash_while_a_stream_runs(folder: Path, text_folder: Path) -> None:
    """Another replica comes, the stream's own is retired: the stream ends whole, and only then is its connection closed."""
    with site(folder, text_folder, PACED, num_engines=2) as made, made.client() as client, made.client() as other:
        write_gateway_file(folder, text_folder, 1, {})
        assert asked(made, "reload") == {"event": "reloaded"}
        with opened(client, ignore_eos=True, max_tokens=600) as lines:
            running = {"ready": True, "reason": "", "open": 1, "refused": False}
            eventually(lambda: asked(made, "status")["models"]["fox"] == {"r0": running})
            path = folder / "gateway.json"
            path.write_text(path.read_text().replace("e0", "e1").replace("r0", "r1"))
            assert asked(made, "reload") == {"event": "reloaded"}
            assert asked(made, "status")["models"]["fox"]["r0"] == {"ready": False, "reason": "retired", "open": 1, "refused": False}
            made.wait_until("/ready", 200)
            assert other.post("/v1/chat/completions", json=chat(max_tokens=3)).status_code == 200
            assert list(lines)[-1] == "data: [DONE]"
        idle = {"ready": True, "reason": "", "open": 0, "refused": False}
        eventually(lambda: asked(made, "status")["models"]["fox"] == {"r1": idle})
        path.write_text(path.read_text().replace('"port": 0', '"port": 1'))
        said = asked(made, "reload")
        assert (said["event"], "port" in said["reason"]) == ("refused", True)


def asked(made: Site, event: str) -> dict[str, Any]:
    """What a gateway answers, without the id, which is the request's."""
    made.gateway.leash.sendall(json.dumps({"event": event, "id": 5}).encode() + b"\n")
    said = made.gateway.hear()
    assert said.pop("id") == 5
    return said


@contextmanager
def opened(client: httpx2.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """A stream that has begun: the lines of its data."""
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **fields)) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


@pytest.mark.parametrize(
    ("changes", "words"), [({"prot": 1}, "Did you mean port?"), ({"request_log": "/nonexistent/dir/log"}, "request_log")]
)
def test_bad_configuration_is_said_and_not_retried(folder: Path, text_folder: Path, changes: dict[str, Any], words: str) -> None:
    with child(GATEWAY, write_gateway_file(folder, text_folder, 1, changes)) as gateway:
        said = gateway.hear()
        assert (said["event"], said["can_retry"]) == ("failed", False)
        assert words in said["reason"]
        assert gateway.wait() == 2


def test_a_taken_port_is_said_and_may_be_retried(folder: Path, text_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = write_gateway_file(folder, text_folder, 1, {"port": taken.getsockname()[1]})
        with child(GATEWAY, config) as gateway:
            said = gateway.hear()
            assert (said["event"], said["can_retry"]) == ("failed", True)
            assert "cannot listen on 127.0.0.1" in said["reason"]
            assert gateway.wait() == 1
