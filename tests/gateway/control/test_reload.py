"""Tests a gateway whose configuration changes while requests run: what is applied, what is refused, and what running requests notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from gateway_kit import (
    MODEL,
    SAID,
    FakeReplica,
    TestBench,
    chat_body,
    dial,
    events_of,
    eventually,
    gateway_config,
    metric,
    open_bench,
    post,
    serving,
    snapshot,
)
from identity_kit import administration
from local_workers import HeldWorkers, LocalWorkers

from headrace.core.errors import CheckpointError, ConfigError, HeadraceError
from headrace.core.load import AttemptCounts
from headrace.core.option import Reload, leaves
from headrace.gateway.access.administration import NewKey
from headrace.gateway.access.open_requests import Draining
from headrace.gateway.config import GatewayConfig
from headrace.gateway.control import reload as control_reload
from headrace.gateway.control.reload import CHANGEABLE, check_change
from headrace.gateway.control.site_models import SERIES_KEPT_S
from headrace.gateway.generation.run import DEADLINE_GRACE_S
from headrace.gateway.text_host import TextContext
from headrace.gateway.text_workers.frames import HostConfig
from headrace.gateway.upstream.own.replica_health import ReplicaCircuit
from headrace.machine.signals import StopSignals
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind, ReplicaStatus

pytestmark = pytest.mark.loop

FIXED = ("host", "port", "workers", "otlp_traces_endpoint", "salt_key", "store", "state", "sessions")
"""Options of the gateway that take a restart."""


def model(name: str, *replicas: str, **changes: Any) -> dict[str, Any]:
    """A model of a configuration, with these replicas."""
    listed = [{"name": replica, "address": f"unix:/nowhere/{replica}"} for replica in replicas]
    return {"name": name, "folder": "/nowhere", "replicas": listed, **changes}


async def apply(bench: TestBench, *models: dict[str, Any], **changes: Any) -> None:
    config = gateway_config(models=list(models), **changes)
    await bench.reloader.reload(lambda: config)
    bench.reloader.check()


async def ask(bench: TestBench, name: str, **fields: Any) -> httpx2.Response:
    return await bench.chat(**{**fields, "model": name})


def said(response: httpx2.Response) -> str:
    """The text of a stream that ended whole."""
    assert response.text.endswith("data: [DONE]\n\n")
    return "".join(choice["delta"].get("content", "") for event in events_of(response.text) for choice in event["choices"])


def names(bench: TestBench) -> Sequence[str]:
    return [replica.name for replica in bench.gateway.service.models.get(MODEL).upstream.replicas()]


@pytest.fixture
async def bench(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text, models=[model(MODEL, "r0")]) as opened:
        yield opened


def statuses(bench: TestBench) -> dict[str, dict[str, ReplicaStatus]]:
    """Without load and counts."""
    return {
        model: {name: replace(each, load=None, attempts=AttemptCounts()) for name, each in status.replicas.items()}
        for model, status in bench.reloader.status().items()
    }


async def held_stream(bench: TestBench, replica: FakeReplica, name: str = MODEL) -> asyncio.Task[httpx2.Response]:
    """A stream that says nothing before `replica.go` is set."""
    replica.go.clear()
    num_open = replica.num_open
    running = asyncio.create_task(ask(bench, name, stream=True))
    await eventually(lambda: replica.num_open == num_open + 1)
    return running


# -- replicas ----------------------------------------------------------------------------------------------------------------------


async def test_replicas_come_and_go(bench: TestBench) -> None:
    await apply(bench, model(MODEL, "r0", "r1"))
    assert names(bench) == ["r0", "r1"]
    bench.replicas["r0"].state = ConnectionState.DOWN
    assert (await bench.chat()).status_code == 200
    assert len(bench.replicas["r1"].requests) == 1
    await apply(bench, model(MODEL, "r1"))
    assert names(bench) == ["r1"]
    assert (await bench.chat()).status_code == 200


async def test_the_status_counts_what_was_asked_and_sent(bench: TestBench) -> None:
    for _ in range(3):
        assert (await bench.chat()).status_code == 200
    seen = bench.reloader.status()[MODEL]
    attempts = seen.replicas["r0"].attempts
    assert (seen.num_arrived, attempts.num_sent, attempts.num_begun) == (3, 3, 3)
    await apply(bench, model(MODEL, "r0", "r1"))
    assert bench.reloader.status()[MODEL].replicas["r0"].attempts.num_sent == 3, "a reload keeps the counts of what stays"


async def test_a_retired_replica_finishes_its_streams_and_gets_no_new_one(bench: TestBench) -> None:
    old = bench.replicas["r0"]
    running = await held_stream(bench, old)
    await apply(bench, model(MODEL, "r1"))
    assert statuses(bench) == {MODEL: {"r0": ReplicaStatus(False, "retired", 1), "r1": ReplicaStatus(True, "", 0)}}
    assert (await bench.chat()).status_code == 200
    assert (len(old.requests), len(bench.replicas["r1"].requests)) == (1, 1)
    old.go.set()
    assert said(await running) == SAID
    await eventually(lambda: set(statuses(bench)[MODEL]) == {"r1"})
    assert old.is_closed


async def test_a_retired_replica_that_ends_moves_its_streams(text: TextModel) -> None:
    async with open_bench(text, models=[model(MODEL, "r0")], timeouts={"failover_s": 10}) as bench:
        old = bench.replicas["r0"]
        running = await held_stream(bench, old)
        await apply(bench, model(MODEL, "r1"), timeouts={"failover_s": 10})
        old.die()
        assert said(await running) == SAID
        assert len(bench.replicas["r1"].requests) == 1
        await eventually(lambda: old.is_closed)


async def test_a_stream_that_waits_for_a_replica_is_still_woken_when_failover_is_turned_off(text: TextModel) -> None:
    fox = model(MODEL, "r0", "r1")
    async with open_bench(text, models=[fox], timeouts={"failover_s": 30}) as bench:
        first, second = bench.replicas.values()
        second.state = ConnectionState.DOWN
        running = await held_stream(bench, first)
        first.die()
        await asyncio.sleep(20)
        await apply(bench, fox)
        second.state = ConnectionState.CONNECTED
        assert said(await running) == SAID
        assert len(second.requests) == 1


async def test_a_replica_with_another_address_is_connected_to_anew(bench: TestBench) -> None:
    old = bench.replicas["r0"]
    running = await held_stream(bench, old)
    changed = model(MODEL, "r0")
    changed["replicas"][0]["address"] = "unix:/elsewhere"
    await apply(bench, changed)
    assert (await bench.chat()).status_code == 200
    assert len(old.requests) == 1
    assert statuses(bench) == {MODEL: {"r0": ReplicaStatus(True, "", 1)}}
    metrics = (await bench.client.get("/metrics")).text
    assert metrics.count(f'headrace_replica_ready{{model="{MODEL}",replica="r0"}}') == 1
    old.go.set()
    assert said(await running) == SAID


async def test_a_token_that_changed_in_its_file_is_read_again(text: TextModel, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 20)
    token.chmod(0o600)
    fox = model(MODEL, "r0")
    fox["replicas"][0] |= {"address": "127.0.0.1:7001", "token_file": str(token)}
    async with open_bench(text, models=[fox]) as bench:
        first = bench.replicas["r0"]
        await apply(bench, fox)
        assert bench.replicas["r0"] is first
        token.write_text("b" * 20)
        await apply(bench, fox)
        assert bench.replicas["r0"] is not first
        await eventually(lambda: first.is_closed)


async def test_a_model_without_replicas_is_answered_with_its_reason_until_one_comes(text: TextModel) -> None:
    none = {**model(MODEL), "unavailable": "Its engine refused its configuration or weights."}
    async with open_bench(text, models=[none]) as bench:
        for _ in range(2):
            answer = await bench.chat()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            assert answer.json()["error"]["message"] == f"The model {MODEL} cannot be served now. {none['unavailable']}"
            ready = await bench.client.get("/ready?strict")
            assert (ready.status_code, ready.json()["reason"]) == (503, f"{MODEL} has no replica")
            await apply(bench, model(MODEL, "r0"))
            assert (await bench.chat()).status_code == 200
            assert (await bench.client.get("/ready?strict")).status_code == 200
            await apply(bench, none)


# -- models ------------------------------------------------------------------------------------------------------------------------


async def test_models_come_and_go(bench: TestBench) -> None:
    await apply(bench, model(MODEL, "r0"), model("owl", "o0", aliases=["bird"]))
    assert (await ask(bench, "owl")).status_code == (await ask(bench, "bird")).status_code == 200
    listed = (await bench.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == [MODEL, "owl", "bird"]
    assert (await bench.client.post("/tokenize", json={"model": "owl", "prompt": "Hello"})).status_code == 200
    await apply(bench, model("owl", "o0"))
    for gone in (MODEL, "bird"):
        refused = await ask(bench, gone)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert (await ask(bench, "owl")).status_code == 200
    await eventually(lambda: bench.replicas["r0"].is_closed)
    assert not bench.replicas["o0"].is_closed


async def test_a_stream_outlives_its_model(bench: TestBench) -> None:
    old = bench.replicas["r0"]
    running = await held_stream(bench, old)
    await apply(bench, model("owl", "o0"))
    assert (await bench.chat()).status_code == 404
    assert statuses(bench) == {MODEL: {"r0": ReplicaStatus(False, "retired", 1)}, "owl": {"o0": ReplicaStatus(True, "", 0)}}
    old.go.set()
    assert said(await running) == SAID
    await eventually(lambda: set(bench.reloader.status()) == {"owl"})
    assert old.is_closed


async def test_a_request_that_is_still_arriving_gets_the_model_it_began_with(bench: TestBench) -> None:
    """Its head came before the reload, the end of its body after it."""
    asked = post("/v1/chat/completions", chat_body(stream=True), "connection: close")
    async with serving(bench.gateway) as port, dial(port) as (reader, writer):
        writer.write(asked[:-5])
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 1)
        await apply(bench, model("owl", "o0"))
        assert (await bench.chat()).status_code == 404
        writer.write(asked[-5:])
        answer = (await reader.read()).decode()
    assert answer.startswith("HTTP/1.1 200")
    assert "[DONE]" in answer
    await eventually(lambda: bench.replicas["r0"].is_closed)


async def test_a_prompt_that_waits_is_read_by_new_text_workers_although_its_model_left(text: TextModel) -> None:
    """The one before it ends at the worker that has it."""
    one = {"max_text_workers": 1}
    workers = HeldWorkers(TextContext({MODEL: text}))
    async with open_bench(text, workers=workers, models=[model(MODEL, "r0")], limits=one) as bench:
        first = asyncio.create_task(bench.chat())
        await eventually(lambda: len(workers.held) == 1)
        second = asyncio.create_task(bench.chat())
        await eventually(lambda: bench.gateway.service.text_pool.reading().num_waiting == 1)
        await apply(bench, model("owl", "o0"), limits=one)
        assert (await second).status_code == 200
        assert not first.done()
        workers.held[0]()
        assert (await first).status_code == 200
        await eventually(lambda: set(bench.reloader.status()) == {"owl"})


async def test_another_tokenizer_is_another_model_for_later_requests(text: TextModel) -> None:
    """Engines of a folder are held to its tokenizer: all of them are connected to anew."""
    other = replace(text, digests={"tokenizer": "another"})
    async with open_bench(text, models=[model(MODEL, "r0")], load=lambda _: other) as bench:
        old = bench.replicas["r0"]
        running = await held_stream(bench, old)
        await apply(bench, model(MODEL, "r0", folder="/elsewhere"))
        new = bench.replicas["r0"]
        assert new is not old
        assert (await bench.chat()).status_code == 200
        assert (len(old.requests), len(new.requests)) == (1, 1)
        old.go.set()
        assert said(await running) == SAID
        await eventually(lambda: old.is_closed)
        assert not new.is_closed


async def test_another_folder_of_the_same_text_keeps_connections_and_streams(bench: TestBench) -> None:
    """Text workers that start later read the new folder: the old one may be gone by then."""
    kept = bench.replicas["r0"]
    running = await held_stream(bench, kept)
    await apply(bench, model(MODEL, "r0", "r1", folder="/elsewhere"))
    assert (bench.replicas["r0"], bench.reloader.status()[MODEL].replicas["r0"].num_open) == (kept, 1)
    assert bench.reloader._texts.host.models == {MODEL: "/elsewhere"}
    kept.go.set()
    assert said(await running) == SAID
    assert (await bench.chat()).status_code == 200
    await apply(bench, model(MODEL, "r0"))
    assert bench.replicas["r0"] is kept, "a rollout goes back"


async def test_aliases_and_parsers_change_without_a_new_connection(bench: TestBench) -> None:
    old = bench.replicas["r0"]
    created = bench.gateway.service.models.get(MODEL).created
    await apply(bench, model(MODEL, "r0", aliases=["vixen"], tool_call_parser="hermes"))
    assert (await ask(bench, "vixen")).status_code == 200
    assert bench.replicas["r0"] is old
    assert bench.gateway.service.models.get("vixen").created == created
    await apply(bench, model(MODEL, "r0"))
    assert (await ask(bench, "vixen")).status_code == 404


async def test_foreign_servers_come_and_go(text: TextModel, bench: TestBench) -> None:
    async with open_bench(text) as far, serving(far.gateway) as port:
        upstreams = [{"url": f"http://127.0.0.1:{port}/v1", "model": MODEL}]
        await apply(bench, model(MODEL, "r0"), {"name": "far", "upstreams": upstreams})
        assert (await ask(bench, "far")).json()["choices"][0]["message"]["content"] == SAID
        running = await held_stream(bench, far.replica, "far")
        await apply(bench, model(MODEL, "r0"), {"name": "far", "upstreams": [{**upstreams[0], "silence_s": 9}]})
        assert statuses(bench)["far"] == {"foreign-0": ReplicaStatus(True, "", 1)}
        await apply(bench, model(MODEL, "r0"))
        assert (await ask(bench, "far")).status_code == 404
        assert statuses(bench)["far"] == {"foreign-0": ReplicaStatus(False, "retired", 1)}
        far.replica.go.set()
        assert said(await running) == SAID
        await eventually(lambda: set(bench.reloader.status()) == {MODEL})


async def test_a_change_of_foreign_servers_leaves_the_circuits_of_replicas_as_they_are(bench: TestBench) -> None:
    def circuit() -> ReplicaCircuit:
        pool = bench.reloader._models.models[MODEL].pool
        assert pool is not None
        return pool.replicas[0].circuit

    first = circuit()
    upstreams = [{"url": "http://127.0.0.1:9/v1", "model": MODEL}]
    await apply(bench, {**model(MODEL, "r0"), "upstreams": upstreams})
    assert circuit() is first
    await apply(bench, {**model(MODEL, "r0"), "upstreams": [{**upstreams[0], "silence_s": 9}]})
    assert circuit() is first, "what the replica has failed is not forgotten"


async def test_text_workers_do_not_inherit_the_key_of_a_server_that_comes(
    text: TextModel, bench: TestBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were started when nothing said that the variable holds a key."""
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(bench.reloader._texts, "_make", partial(local_workers, text, made))
    monkeypatch.setenv("FAR_KEY", "a-secret-key")
    far = {"name": "far", "upstreams": [{"url": "http://127.0.0.1:9/v1", "api_key_env": "FAR_KEY"}]}
    await apply(bench, model(MODEL, "r0"), far)
    assert made == [("FAR_KEY",)]
    await apply(bench, model(MODEL, "r0"), limits={"max_requests": 9})
    assert len(made) == 1, "the present ones will do"
    await apply(bench, model(MODEL, "r0"), limits={"max_text_workers": 3})
    assert made == [("FAR_KEY",), ("FAR_KEY",)]
    assert bench.gateway.service.text_pool.max_workers == 3


def local_workers(text: TextModel, made: list[tuple[str, ...]], host: HostConfig, withheld: Collection[str]) -> LocalWorkers:
    made.append(tuple(withheld))
    return LocalWorkers(TextContext(dict.fromkeys(host.models, text)))


# -- keys, origins, limits, timeouts -----------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_keys_change_for_later_requests_and_no_running_one(bench: TestBench) -> None:
    async def asked(key: str) -> int:
        return (await bench.client.post("/v1/chat/completions", json=chat_body(), headers=bearer(key))).status_code

    replica = bench.replicas["r0"]
    await apply(bench, model(MODEL, "r0"), api_keys=[{"key": "first-key-1"}])
    assert (await asked("first-key-1"), await asked("other-key-2")) == (200, 401)
    replica.go.clear()
    body = chat_body(stream=True)
    running = asyncio.create_task(bench.client.post("/v1/chat/completions", json=body, headers=bearer("first-key-1")))
    await eventually(lambda: replica.num_open == 1)
    await apply(bench, model(MODEL, "r0"), api_keys=[{"key": "other-key-2"}])
    replica.go.set()
    assert said(await running) == SAID
    assert (await asked("first-key-1"), await asked("other-key-2")) == (401, 200)
    await apply(bench, model(MODEL, "r0"))
    assert (await bench.chat()).status_code == 200


async def test_a_gateways_own_file_does_not_lose_its_keys_by_a_hangup(text: TextModel, tmp_path: Path) -> None:
    """What an operator writes is held against what is in force; a supervisor takes changes back, and is followed."""
    keys: dict[str, Any] = {"api_keys": [{"key": "first-key-1"}, {"key": "other-key-2"}]}

    def config(**changes: Any) -> GatewayConfig:
        return gateway_config(models=[model(MODEL, "r0")], state=str(tmp_path), **changes)

    async with open_bench(text, models=[model(MODEL, "r0")], state=str(tmp_path), **keys) as bench:
        with pytest.raises(ConfigError, match=r"^gateway\.api_keys: would be gone, so that no request needs a key any more \(2 keys now\)"):
            await bench.reloader.reload_file(config)
        assert (await bench.chat()).status_code == 401
        priced = {**keys, "prices": {MODEL: {"input": 1.0}}}
        await bench.reloader.reload_file(partial(config, **priced, limits={"daily_budget": 5.0}))
        with pytest.raises(ConfigError, match=r"^gateway\.limits\.daily_budget: protects"):
            await bench.reloader.reload_file(partial(config, **priced))
        await bench.reloader.reload(lambda: config(**keys))
        await bench.reloader.reload_file(partial(config, api_keys=keys["api_keys"][1:]))
        await bench.reloader.reload_file(partial(config, access="open"))
        assert (await bench.chat()).status_code == 200
        await bench.reloader.reload_file(partial(config, **keys))
        with pytest.raises(ConfigError, match=r"^gateway\.api_keys: would be gone"):
            await bench.reloader.reload_file(config)
        await administration(tmp_path).create_key(NewKey(tenant="acme"))
        await asyncio.sleep(1)  # the gateway reads of it
        await bench.reloader.reload_file(config)
        assert (await bench.chat()).status_code == 401, "a stored key is wanted"


async def test_a_hangup_is_held_against_what_is_in_force_and_a_supervisor_is_followed(
    bench: TestBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A supervisor has checked its file, and goes back to the one before where another gateway refuses the change."""
    said: list[str] = []

    class ScriptedLeash:
        def listen(self, hear: Callable[[LeashRequest], None] | None) -> None:
            self.hear = hear

        def reloaded(self, request: LeashRequest) -> None:
            said.append("reloaded")

    @contextmanager
    def hearing(reload: Callable[[], None], stop: StopSignals) -> Iterator[None]:
        hangups.append(reload)
        yield

    hangups: list[Callable[[], None]] = []
    monkeypatch.setattr(control_reload, "on_hangup", hearing)
    await apply(bench, model(MODEL, "r0"), api_keys=[{"key": "first-key-1"}])
    leash = ScriptedLeash()
    without_keys = gateway_config(models=[model(MODEL, "r0")])
    async with control_reload.answering(cast(Leash, leash), bench.reloader, lambda: without_keys, cast(StopSignals, None)):
        hangups[0]()
        await eventually(lambda: "the configuration stays as it is: gateway.api_keys: would be gone" in caplog.text)
        assert (await bench.chat()).status_code == 401
        assert leash.hear is not None
        leash.hear(LeashRequest(LeashRequestKind.RELOAD, 1))
        await eventually(lambda: said == ["reloaded"])
        assert (await bench.chat()).status_code == 200


async def test_many_hangups_are_few_reloads_and_the_last_one_reads_the_file_as_it_is_then(
    bench: TestBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was a reload of its own, and a supervisor's waited behind a thousand."""
    hangups: list[Callable[[], None]] = []

    @contextmanager
    def hearing(reload: Callable[[], None], stop: StopSignals) -> Iterator[None]:
        hangups.append(reload)
        yield

    class SilentLeash:
        def listen(self, hear: Callable[[LeashRequest], None] | None) -> None:
            return

    reads: list[int] = []
    written = 0

    def read() -> GatewayConfig:
        reads.append(written)
        return gateway_config(models=[model(MODEL, "r0")], limits={"max_requests": written})

    monkeypatch.setattr(control_reload, "on_hangup", hearing)
    async with control_reload.answering(cast(Leash, SilentLeash()), bench.reloader, read, cast(StopSignals, None)):
        for written in range(1, 1001):
            hangups[0]()
            if written % 250 == 0:
                await asyncio.sleep(0)
        await eventually(lambda: bench.reloader.config.limits.max_requests == 1000)
    assert len(reads) <= 5
    assert names(bench) == ["r0"]
    assert (await bench.chat()).status_code == 200
    bench.reloader.check()


async def test_hosts_origins_and_open_metrics_change(bench: TestBench) -> None:
    foreign = {"host": "h.example", "origin": "https://app.example"}
    assert (await bench.client.get("/v1/models", headers=foreign)).status_code == 403
    changes = {"allowed_hosts": ["h.example"], "allowed_origins": ["https://app.example"]}
    await apply(bench, model(MODEL, "r0"), open_metrics="totals", api_keys=[{"key": "first-key-1"}], **changes)
    allowed = await bench.client.get("/v1/models", headers={**foreign, **bearer("first-key-1")})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert (await bench.client.get("/metrics")).status_code == 200


async def test_limits_and_timeouts_hold_for_later_requests(bench: TestBench) -> None:
    replica = bench.replicas["r0"]
    running = await held_stream(bench, replica)
    await apply(
        bench, model(MODEL, "r0"), limits={"max_requests": 1, "max_body_bytes": 2000}, timeouts={"failover_s": 5, "request_s": 20.0}
    )
    assert (await bench.chat()).status_code == 429
    assert (await bench.chat(messages=[{"role": "user", "content": "x" * 3000}])).status_code in (413, 429)
    replica.go.set()
    assert said(await running) == SAID, "it began without a deadline"
    assert (await bench.chat(messages=[{"role": "user", "content": "x" * 3000}])).status_code == 413
    replica.go.clear()
    began = asyncio.get_running_loop().time()
    assert (await bench.chat()).status_code == 504
    assert asyncio.get_running_loop().time() == pytest.approx(began + 20 + DEADLINE_GRACE_S)
    replica.go.set()
    await apply(bench, model(MODEL, "r0"))
    assert (await bench.chat()).status_code == 200


async def test_twice_as_many_prompts_as_requests_may_wait_for_a_text_worker(bench: TestBench) -> None:
    await apply(bench, model(MODEL, "r0"), limits={"max_requests": 1, "max_text_workers": 1})
    pool = bench.gateway.service.text_pool
    await eventually(lambda: len(pool._idle) == 1)
    running, *waiting = [pool.parse_body("/v1/chat/completions", b"{}", tenant="t") for _ in range(3)]
    with pytest.raises(HeadraceError, match="wait for a text worker"):
        pool.parse_body("/v1/chat/completions", b"{}", tenant="t")
    await asyncio.gather(running, *waiting, return_exceptions=True)


async def test_what_requests_hold_may_be_more_than_a_lower_limit(bench: TestBench) -> None:
    memory = bench.gateway.service.memory
    with memory.open("one") as held:
        held.answers.add(30 << 20)
        await apply(bench, model(MODEL, "r0"), limits={"max_answer_bytes": 10 << 20})
        memory.check()
        with memory.open("two") as other, pytest.raises(HeadraceError):
            other.answers.add(1 << 20)
    memory.check()
    assert memory.answers.left == 10 << 20


async def test_who_may_read_what_a_connection_answers_follows(bench: TestBench) -> None:
    """Also on a connection that is open, for what is refused before it is a request."""
    async with serving(bench.gateway, bench.reloader) as port, dial(port) as (reader, writer):
        ask_live = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(ask_live)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await apply(bench, model(MODEL, "r0"), allowed_origins=["https://app.example"])
        writer.write(ask_live[:-2] + b"origin: https://app.example\r\naccept: */*\r\nno colon\r\n\r\n")
        answer = await reader.read()
    assert b"HTTP/1.1 400" in answer
    assert b"access-control-allow-origin: https://app.example" in answer


async def test_a_request_log_that_was_moved_away_is_opened_again(text: TextModel, tmp_path: Path) -> None:
    target = tmp_path / "log"
    async with open_bench(text, models=[model(MODEL, "r0")], request_log=str(target)) as bench:
        await bench.chat()
        target.rename(tmp_path / "log.1")
        await apply(bench, model(MODEL, "r0"), request_log=str(target))
        await bench.chat()
        with pytest.raises(ConfigError, match="request_log"):
            await apply(bench, model(MODEL, "r0"), request_log="/nonexistent/log")
        await bench.chat()
    assert [len(path.read_text().splitlines()) for path in (tmp_path / "log.1", target)] == [1, 2]


# -- tenants -----------------------------------------------------------------------------------------------------------------------


async def test_the_cache_follows_and_what_is_kept_stays(bench: TestBench) -> None:
    async def cache_said(question: str) -> str:
        answer = await bench.chat(temperature=0, max_tokens=2, messages=[{"role": "user", "content": question}])
        await eventually(lambda: not bench.gateway.service.stages.answer_cache.num_computing)
        said: str = answer.headers["x-headrace-cache"]
        return said

    served = model(MODEL, "r0")
    assert await cache_said("one") == "off"
    await apply(bench, served, cache={"enabled": True})
    assert [await cache_said("one") for _ in range(2)] == ["miss", "hit"]
    await apply(bench, served, cache={"enabled": False})
    assert await cache_said("one") == "off"
    await apply(bench, served, cache={"enabled": True, "ttl_s": 60})
    assert await cache_said("two") == "miss"
    await asyncio.sleep(59.9)
    assert await cache_said("two") == "hit"
    await asyncio.sleep(0.2)
    assert await cache_said("two") == "miss"
    assert await cache_said("one") == "hit", "it was kept for an hour"
    await apply(bench, served)
    assert await cache_said("one") == "off"


async def test_prices_and_the_bounds_of_queues_hold_for_later_requests(bench: TestBench) -> None:
    def cost() -> float:
        return metric(bench.gateway, "headrace_tenant_cost_total", tenant="default")

    served, replica = model(MODEL, "r0"), bench.replicas["r0"]
    assert (await bench.chat()).status_code == 200
    assert cost() == 0
    running = await held_stream(bench, replica)
    await apply(bench, served, prices={MODEL: {"output": 1_000_000.0}}, admission={"max_wait_s": 5.0})
    replica.go.set()
    await running
    assert cost() == 0, "it began without a price"
    answer = await bench.chat()
    assert cost() == answer.json()["usage"]["completion_tokens"]
    assert replica.snapshot is not None
    queue = replace(snapshot(), max_num_seqs=4, kv_blocks_free=5000, kv_blocks_total=5001, num_queued_tokens=20_000)
    replica.snapshot = replace(replica.snapshot, load=replace(queue, step_fixed_s=1.0, step_token_s=0.001))
    assert (await bench.chat()).status_code == 429
    await apply(bench, served, admission={"max_wait_s": 100.0})
    assert (await bench.chat()).status_code == 200


# -- what is refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.pure
def test_every_option_changes_or_takes_a_restart() -> None:
    """A new key is in FIXED, or what runs follows it, which the tests above show."""
    live = {leaf.path: is_below(leaf.path, CHANGEABLE) for leaf in leaves(GatewayConfig)}
    assert live == {leaf.path: leaf.option.reload is Reload.LIVE for leaf in leaves(GatewayConfig)}
    assert {path for path, is_live in live.items() if not is_live} == {path for path in live if is_below(path, FIXED)}
    assert all(any(is_below(path, [fixed]) for path in live) for fixed in FIXED)


def is_below(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")) for prefix in prefixes)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "127.0.0.2"},
        {"port": 4000},
        {"workers": 2},
        {"salt_key": "ab" * 16},
        {"store": {"url": "unix:///elsewhere"}},
        {"state": "/elsewhere"},
        {"sessions": {"ttl_s": 60.0}},
    ],
)
async def test_what_takes_a_restart_is_refused_by_name_and_nothing_is_changed(bench: TestBench, changes: dict[str, Any]) -> None:
    config = gateway_config(models=[model(MODEL, "r0", "r1")], **changes)
    [where] = [name if not isinstance(value, dict) else f"{name}.{next(iter(value))}" for name, value in changes.items()]
    assert where in FIXED or where.partition(".")[0] in FIXED
    with pytest.raises(ConfigError, match=rf"^{where}: cannot change while the gateway runs\. Start the gateway again") as refused:
        await bench.reloader.reload(lambda: config)
    assert "ab" * 16 not in str(refused.value)
    assert names(bench) == ["r0"]
    assert bench.reloader.config == gateway_config(models=[model(MODEL, "r0")])
    check_change(config, config)


async def test_a_file_with_a_fault_changes_nothing(bench: TestBench) -> None:
    def read() -> GatewayConfig:
        raise ConfigError("models", "is empty")

    ready = await bench.client.get("/ready")
    for _ in range(3):
        with pytest.raises(ConfigError, match="models: is empty"):
            await bench.reloader.reload(read)
        again = await bench.client.get("/ready")
        assert (again.status_code, again.content) == (ready.status_code, ready.content)
    assert ready.status_code == 200
    assert (await bench.chat()).status_code == 200


async def test_one_fault_refuses_all_of_it(text: TextModel, bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that could be opened is closed again, whatever fails after it."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    far = {"name": "far", "upstreams": [{"url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}]}
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        await apply(bench, model(MODEL, "r1"), model("owl", "o0"), far, api_keys=[{"key": "first-key-1"}])
    assert names(bench) == ["r0"]
    assert bench.replicas["o0"].is_closed
    assert (await bench.chat()).status_code == 200, "no key is wanted"
    assert (await ask(bench, "owl")).status_code == 404
    bench.reloader.check()


class Folders:
    """Loads `text` from every folder that is not in `damaged`; counts how often each was asked for."""

    def __init__(self, text: TextModel) -> None:
        self.damaged = {"/damaged"}
        self.num_asked: Counter[str] = Counter()
        self._text = text

    def load(self, folder: str) -> TextModel:
        self.num_asked[folder] += 1
        if folder in self.damaged:
            raise CheckpointError("tokenizer.json", "is missing")
        return self._text


async def test_a_new_model_whose_folder_cannot_be_read_fails_alone_until_a_reload(text: TextModel) -> None:
    folders = Folders(text)
    owl = model("owl", "o0", folder="/damaged")
    async with open_bench(text, models=[model(MODEL, "r0")], load=folders.load) as bench:
        await apply(bench, model(MODEL, "r1"), owl)
        assert names(bench) == ["r1"]
        assert (await bench.chat()).status_code == 200
        refused = await ask(bench, "owl")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert "its tokenizer or chat template cannot be used" in refused.text
        assert "/damaged" not in refused.text
        assert statuses(bench)["owl"] == {"o0": ReplicaStatus(False, "tokenizer.json: is missing.", 0, is_refused=True)}
        assert (await bench.client.get("/ready")).status_code == 200
        assert (await bench.client.get("/ready?strict")).status_code == 503
        bench.reloader.check()

        await apply(bench, model(MODEL, "r1"), {**owl, "replicas": [], "unavailable": "It has no replica now."})
        assert folders.num_asked["/damaged"] == 1, "nothing would use it"
        folders.damaged.clear()
        await apply(bench, model(MODEL, "r1"), owl)
        assert (await ask(bench, "owl")).status_code == 200


async def test_a_model_that_serves_is_not_made_to_fail_by_a_reload(text: TextModel) -> None:
    folders = Folders(text)
    async with open_bench(text, models=[model(MODEL, "r0")], load=folders.load) as bench:
        with pytest.raises(CheckpointError, match="is missing"):
            await apply(bench, model(MODEL, "r1", folder="/damaged"), model("owl", "o0"))
        assert names(bench) == ["r0"]
        bench.reloader.check()


async def test_a_damaged_model_that_foreign_servers_answer_for_is_answered_by_them(text: TextModel) -> None:
    async with open_bench(text) as far, serving(far.gateway) as port:
        upstreams = [{"url": f"http://127.0.0.1:{port}/v1", "model": MODEL}]
        async with open_bench(text, models=[model(MODEL, "r0")], load=Folders(text).load) as bench:
            await apply(bench, model(MODEL, "r0"), {**model("owl", "o0", folder="/damaged"), "upstreams": upstreams})
            assert (await ask(bench, "owl")).json()["choices"][0]["message"]["content"] == SAID


async def test_a_gateway_whose_every_model_is_damaged_refuses_to_start(text: TextModel) -> None:
    damaged = LocalWorkers(TextContext({}), {MODEL: CheckpointError("chat_template", "is a bomb")})
    with pytest.raises(CheckpointError, match=f"{MODEL}/chat_template: is a bomb"):
        async with open_bench(text, workers=damaged):
            pass
    owls = [model(MODEL, "r0"), model("owl", "o0")]
    async with open_bench(text, workers=LocalWorkers(TextContext({"owl": text}), damaged.failures), models=owls) as bench:
        assert (await bench.chat()).status_code == 503
        assert (await ask(bench, "owl")).status_code == 200


async def test_a_gateway_that_shuts_down_changes_nothing(bench: TestBench) -> None:
    bench.gateway.service.open_requests.drain()
    with pytest.raises(Draining):
        await apply(bench, model(MODEL, "r1"))
    assert names(bench) == ["r0"]


# -- metrics -----------------------------------------------------------------------------------------------------------------------


async def test_failures_are_counted_from_zero_so_that_the_first_ones_are_in_a_rate(bench: TestBench) -> None:
    await apply(bench, model(MODEL, "r0", "r1"), model("owl", "o0"))
    page = bench.gateway.metrics.page()[0].decode()
    for name, replica in ((MODEL, ""), (MODEL, "r0"), (MODEL, "r1"), ("owl", ""), ("owl", "o0")):
        for outcome in ("failed", "deadline"):
            assert f'headrace_requests_total{{model="{name}",outcome="{outcome}",replica="{replica}"}} 0.0' in page


async def test_series_of_what_left_are_dropped_after_a_while(bench: TestBench) -> None:
    def shown() -> set[str]:
        page = bench.gateway.metrics.page()[0].decode()
        return {name for name in ("r0", "r1", "o0") if f'replica="{name}"' in page}

    await bench.chat()
    await apply(bench, model(MODEL, "r0", "r1"), model("owl", "o0"))
    await bench.chat()
    await ask(bench, "owl", stream=True)
    assert shown() == {"r0", "r1", "o0"}
    await apply(bench, model(MODEL, "r1"))
    await eventually(lambda: bench.replicas["r0"].is_closed and bench.replicas["o0"].is_closed)
    await asyncio.sleep(SERIES_KEPT_S - 1)
    assert shown() == {"r0", "r1", "o0"}
    await asyncio.sleep(1.1)
    assert shown() == {"r1"}
    assert 'model="owl"' not in bench.gateway.metrics.page()[0].decode()


async def test_a_name_that_comes_back_keeps_its_series(bench: TestBench) -> None:
    await bench.chat()
    await apply(bench, model(MODEL, "r1"))
    await eventually(lambda: bench.replicas["r0"].is_closed)
    await asyncio.sleep(SERIES_KEPT_S - 1)
    await apply(bench, model(MODEL, "r0", "r1"))
    await asyncio.sleep(SERIES_KEPT_S)
    assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="stop") == 1
