"""Tests Last-Event-ID: what is refused and how, one resume at a time, and a store that is down or slow."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_kit import MODEL, TestBench, eventually, metric, open_bench
from loop_network import NetworkedLoop
from resume_kit import CHAT, COMPLETIONS, Event, answer_of, equal, kept, send, streaming_body, two_gateways

from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.generation.kept_streams import GIVE_WAY_S, KEPT_S, SIBLINGS_S, KeptStream
from headrace.gateway.http.sse import LAST_EVENT, NO_EVENT
from headrace.gateway.site import GatewayWorker, Siblings
from headrace.gateway.stores.guard import REQUEST_WAIT_S, WRITE_S
from headrace.gateway.stores.lease import GIVE_BACK_PAUSES_S
from headrace.gateway.stores.store import Store, StoreFailed, StoreProgress
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

BODY = streaming_body(CHAT, max_tokens=12, ignore_eos=True)


async def left(bench: TestBench, *, after: int = 4, body: bytes = BODY, key: str | None = None) -> list[Event]:
    """The events of a stream that its client left."""
    events = (await send(bench.gateway, CHAT, body, leave_after=after, key=key)).events
    await kept(bench)
    return events


async def go_on(bench: TestBench, last_event: str, body: bytes = BODY, key: str | None = None) -> Any:
    return await send(bench.gateway, CHAT, body, last_event=last_event, key=key)


async def test_only_what_can_be_made_again_has_ids(text: TextModel) -> None:
    async with open_bench(text) as bench:
        body = streaming_body(COMPLETIONS, echo=True, logprobs=1, max_tokens=3)
        assert not any(event.id for event in (await send(bench.gateway, COMPLETIONS, body)).events)
        failing = await send(bench.gateway, COMPLETIONS, body, last_event=f"{'a' * 24}/3")
        assert failing.status == 404


@pytest.mark.parametrize(
    "given", ["5", "abc/1", f"{'a' * 24}", f"{'a' * 24}/0", f"{'a' * 24}/-1", f"{'A' * 24}/1", f"{'a' * 24}/1234567890", "\u00e9/1"]
)
async def test_an_id_of_another_form_is_refused(text: TextModel, given: str) -> None:
    async with open_bench(text) as bench:
        refused = await go_on(bench, given)
        assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")


async def test_events_have_ids_where_the_client_asks_for_them(text: TextModel) -> None:
    """Many clients take each line of a stream for data."""
    async with open_bench(text) as bench:
        plain = await bench.client.post(CHAT, content=BODY, headers={"content-type": "application/json"})
        assert plain.text.startswith("data: ")
        assert "id: " not in plain.text
        assert bench.gateway.service.stages.kept_streams.num_writing == 0
        headers = [{"content-type": "application/json", LAST_EVENT: given} for given in ("", NO_EVENT)]
        asked = [await bench.client.post(CHAT, content=BODY, headers=each) for each in headers]
        for answer in asked:
            assert answer.text.startswith(f"id: {answer.headers['x-request-id']}/1\ndata: ")


async def test_an_unknown_id_and_another_tenants_are_answered_alike(text: TextModel) -> None:
    keys = [{"key": "key-of-one", "tenant": "one"}, {"key": "key-of-two", "tenant": "two"}]
    async with open_bench(text, api_keys=keys) as bench:
        equal(bench.replica)
        events = await left(bench, key="key-of-one")
        unknown = await go_on(bench, f"{'a' * 24}/4", key="key-of-two")
        foreign = await go_on(bench, events[-1].id, key="key-of-two")
        assert foreign.status == unknown.status == 404
        assert foreign.body == unknown.body
        assert (await go_on(bench, events[-1].id, key="key-of-one")).status == 200


async def test_another_body_or_number_is_refused_and_the_stream_stays(text: TextModel) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        answer_id = events[-1].id.partition("/")[0]
        other = await go_on(bench, events[-1].id, streaming_body(CHAT, max_tokens=13, ignore_eos=True))
        assert (other.status, other.error["param"]) == (400, "Last-Event-ID")
        beyond = await go_on(bench, f"{answer_id}/400")
        assert (beyond.status, beyond.error["param"]) == (400, "Last-Event-ID")
        whole = await send(bench.gateway, CHAT, BODY.replace(b'"stream": true', b'"stream": false'), last_event=events[-1].id)
        assert (whole.status, whole.error["param"]) == (400, "Last-Event-ID")
        assert (await go_on(bench, events[-1].id)).status == 200
        assert metric(bench.gateway, "headrace_streams_continued_total", outcome="refused") == 2
        assert metric(bench.gateway, "headrace_streams_continued_total", outcome="continued") == 1


def now() -> float:
    return asyncio.get_running_loop().time()


async def begun(bench: TestBench, *, key: str | None = None) -> tuple[str, asyncio.Task[Any]]:
    """A stream of three events a second that its client does not leave, after its second event: its id, and what the client gets."""
    bench.replica.token_delay_s = 1 / 3
    sent: list[bytes] = []
    old = asyncio.create_task(send(bench.gateway, CHAT, BODY, on_body=sent.append, key=key))
    await eventually(lambda: b"".join(sent).count(b"\n\n") >= 2)
    return b"".join(sent).split(b"/")[0].removeprefix(b"id: ").decode(), old


@pytest.mark.usefixtures("shipped_patience")
async def test_a_newer_connection_at_another_worker_takes_a_stream_from_an_older_one(text: TextModel, tmp_path: Path) -> None:
    keys = [{"key": "key-of-one", "tenant": "a"}, {"key": "key-of-two", "tenant": "b"}]
    async with (
        two_gateways(text, tmp_path, api_keys=keys) as (first, second),
        Siblings(GatewayWorker(0, tmp_path), 2) as here,
        Siblings(GatewayWorker(1, tmp_path), 2) as there,
    ):
        first.gateway.service.stages.kept_streams.join(here)
        second.gateway.service.stages.kept_streams.join(there)
        answer_id, old = await begun(first, key="key-of-one")
        assert (await go_on(second, f"{answer_id}/2", key="key-of-two")).status == 404, "another tenant's stream is unknown"
        assert (await go_on(second, f"{answer_id}/2", key="key-of-one")).status == 409, "it has just begun"
        await asyncio.sleep(GIVE_WAY_S)
        continued = await go_on(second, f"{answer_id}/2", key="key-of-one")
        events = (await old).events
        assert events[-1].data != "[DONE]"
        assert answer_of([*events[:2], *continued.events])["done"]


@pytest.mark.usefixtures("shipped_patience")
async def test_a_worker_that_hangs_costs_a_resume_nothing_but_the_stream(text: TextModel, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, NetworkedLoop)
    worker = GatewayWorker(0, tmp_path)
    silent = loop.network.listen_at(str(worker.socket(1)))
    async with open_bench(text) as bench, Siblings(worker, 2) as siblings:
        bench.gateway.service.stages.kept_streams.join(siblings)
        began = now()
        unknown = await go_on(bench, f"{'a' * 24}/3")
        assert (unknown.status, unknown.headers["retry-after"]) == (404, "1")
        assert now() - began == pytest.approx(SIBLINGS_S)
    silent.close()


async def test_a_stream_is_forgotten_after_its_time(text: TextModel) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        one, two = await left(bench), await left(bench)
        await asyncio.sleep(KEPT_S - 0.1)
        assert (await go_on(bench, one[-1].id)).status == 200
        await asyncio.sleep(0.2)
        unknown = await go_on(bench, two[-1].id)
        assert (unknown.status, unknown.headers["retry-after"]) == (404, "1"), "another gateway may still keep it"


async def test_of_two_resumes_at_once_one_wins(text: TextModel, tmp_path: Path) -> None:
    async with two_gateways(text, tmp_path) as (first, second):
        events = await left(first)
        for bench in (first, second):
            bench.replica.go.clear()  # the winner's stream lasts until all have asked
        asking = [asyncio.create_task(go_on(bench, events[-1].id)) for bench in (first, second, first, second)]
        await eventually(lambda: sum(task.done() for task in asking) >= 3)
        for bench in (first, second):
            bench.replica.go.set()
        answers = await asyncio.gather(*asking)
        assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
        (won,) = [answer for answer in answers if answer.status == 200]
        assert won.events[-1].data == "[DONE]"
        assert all(answer.headers["retry-after"] for answer in answers if answer.status == 409)


async def test_while_a_stream_goes_on_at_another_gateway_it_is_taken(text: TextModel, tmp_path: Path) -> None:
    async with two_gateways(text, tmp_path) as (first, second):
        events = await left(first)
        second.replica.go.clear()
        running = asyncio.create_task(go_on(second, events[-1].id))
        await eventually(lambda: bool(second.replica.requests))
        assert (await go_on(first, events[-1].id)).status == 409
        second.replica.go.set()
        assert (await running).status == 200


async def test_a_newer_connection_takes_a_stream_from_an_older_one(text: TextModel) -> None:
    """The older one, at the same gateway, may have broken without a sign until its socket gives up."""
    async with open_bench(text) as bench:
        equal(bench.replica)
        began = now()
        answer_id, old = await begun(bench)
        await asyncio.sleep(began + GIVE_WAY_S - 0.01 - now())
        assert (await go_on(bench, f"{answer_id}/2")).status == 409, "of two resumes at once one wins"
        await asyncio.sleep(0.02)
        continued = await go_on(bench, f"{answer_id}/2")
        events = (await old).events
        assert events[-1].data != "[DONE]"
        assert answer_of([*events[:2], *continued.events])["done"]
        assert not bench.replica.num_open
        assert len(bench.replica.cancelled) == 1


async def test_a_stranger_cannot_end_a_stream(text: TextModel) -> None:
    keys = [{"key": "key-of-one", "tenant": "one"}, {"key": "key-of-two", "tenant": "two"}]
    async with open_bench(text, api_keys=keys) as bench:
        equal(bench.replica)
        sent: list[bytes] = []
        bench.replica.token_delay_s = 0.01
        old = asyncio.create_task(send(bench.gateway, CHAT, BODY, on_body=sent.append, key="key-of-one"))
        await eventually(lambda: len(sent) >= 3)
        bench.replica.go.clear()  # it is still being sent when the others ask
        answer_id = sent[0].split(b"/")[0].removeprefix(b"id: ").decode()
        assert (await go_on(bench, f"{answer_id}/2", key="key-of-two")).status == 404
        assert (await go_on(bench, f"{answer_id}/2", BODY + b" ", key="key-of-one")).status == 404
        bench.replica.go.set()
        assert (await old).events[-1].data == "[DONE]"


async def test_a_resume_that_no_replica_takes_can_be_tried_again(text: TextModel) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        bench.replica.state = ConnectionState.DOWN
        failed = await go_on(bench, events[-1].id)
        assert "error" in failed.events[-1].json()
        await kept(bench)
        bench.replica.state = ConnectionState.CONNECTED
        last = [*events, *failed.events[:-1]][-1].id
        assert answer_of([*events, *failed.events[:-1], *(await go_on(bench, last)).events])["done"]


async def test_a_stream_that_failed_by_itself_is_not_kept(text: TextModel) -> None:
    def fail(request: EngineRequest, stream: ReplicaStream) -> None:
        common: dict[str, Any] = {"request_id": request.request_id, "epoch": request.epoch, "index": 0}
        stream.put(SequenceUpdate(**common, token_ids=(70,)))
        stream.put(SequenceUpdate(**common, finish=FinishReason.ERROR, error="device"))

    async with open_bench(text) as bench:
        equal(bench.replica)
        bench.replica.on_submit = fail
        failed = await send(bench.gateway, CHAT, BODY)
        await kept(bench)
        assert metric(bench.gateway, "headrace_streams_kept_total", outcome="kept") == 0
        if events := [event for event in failed.events if event.id]:
            assert (await go_on(bench, events[-1].id)).status == 404


async def test_a_stream_whose_replica_is_lost_can_be_continued(text: TextModel) -> None:
    async with open_bench(text) as bench:
        replica = bench.replica
        equal(replica)
        info, snapshot = replica.info, replica.snapshot
        sent: list[bytes] = []
        replica.token_delay_s = 0.01
        running = asyncio.create_task(send(bench.gateway, CHAT, BODY, on_body=sent.append))
        await eventually(lambda: len(sent) >= 3)
        replica.die()
        begun = (await running).events
        assert begun.pop().json()["error"]["code"] == "unavailable"
        await kept(bench)
        replica.info, replica.snapshot, replica.state = info, snapshot, ConnectionState.CONNECTED
        assert answer_of([*begun, *(await go_on(bench, begun[-1].id)).events])["done"]


async def test_the_store_holds_no_text_and_no_prompt(text: TextModel, tmp_path: Path) -> None:
    async with two_gateways(text, tmp_path) as (first, _):
        await send(first.gateway, CHAT, streaming_body(CHAT, messages=[{"role": "user", "content": "a secret prompt"}]))
        await kept(first)
        stored = b"".join(path.read_bytes() for path in tmp_path.glob("entries.db*"))
        assert b"secret" not in stored
        assert b"quick brown" not in stored


def _store(bench: TestBench) -> Store:
    guarded = bench.gateway.service.stages.kept_streams._store
    assert guarded is not None
    return guarded.store


class BadStore:
    """Down, or slow beyond all patience."""

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.progress = StoreProgress()

    async def _fail(self, *_: object, **__: object) -> Any:
        if self.is_slow:
            await asyncio.sleep(3600)
        raise StoreFailed("connection refused")

    put = get = swap = delete = _fail

    async def close(self) -> None:
        return


@pytest.mark.usefixtures("shipped_patience")
@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_bad_store_costs_resuming_and_no_answer(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.gateway.compose.Stores.open_streams", lambda *_: BadStore(is_slow=is_slow))
    async with open_bench(text) as bench:
        equal(bench.replica)
        began = now()
        events = (await send(bench.gateway, CHAT, BODY)).events
        assert events[-1].data == "[DONE]"
        assert now() == began, "the answer does not wait for the store"
        failed = await go_on(bench, events[3].id)
        assert (failed.status, failed.error["code"]) == (503, "unavailable")
        assert now() - began == pytest.approx(REQUEST_WAIT_S)
        streams = bench.gateway.service.stages.kept_streams
        await asyncio.sleep(began + WRITE_S - 0.01 - now())
        assert streams.num_writing == 1, "it may still be written"
        await asyncio.sleep(0.02)
        assert streams.num_writing == 0
        assert metric(bench.gateway, "headrace_streams_kept_total", outcome="failed") == 1
        assert metric(bench.gateway, "headrace_streams_continued_total", outcome="failed") == 1
    assert "the store of streams: " in caplog.text


@pytest.mark.usefixtures("shipped_patience")
async def test_a_claim_that_comes_too_late_is_given_back(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        store = _store(bench)
        late: list[asyncio.Task[bool]] = []
        is_given_up = asyncio.Event()

        async def swap_late(*given: Any, **more: Any) -> bool:
            async def swap() -> bool:
                await is_given_up.wait()
                return await real(*given, **more)

            late.append(asyncio.create_task(swap()))
            return await asyncio.shield(late[0])

        real = store.swap
        with monkeypatch.context() as patched:
            patched.setattr(store, "swap", swap_late)
            running = asyncio.create_task(go_on(bench, events[-1].id))
            await eventually(lambda: bool(late))
        assert (await running).status == 503
        await asyncio.sleep(sum(GIVE_BACK_PAUSES_S[:-1]) - 0.1)  # the claim is asked back in vain
        assert bench.gateway.service.stages.kept_streams.num_writing == 1
        is_given_up.set()
        assert await late[0], "the store took the claim after all"
        await kept(bench)
        continued = await go_on(bench, events[-1].id)
        assert answer_of([*events, *continued.events])["done"]


@pytest.mark.usefixtures("shipped_patience")
async def test_a_claim_that_is_given_back_leaves_the_claim_of_another_request(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        store = _store(bench)
        with monkeypatch.context() as patched:
            patched.setattr(store, "swap", BadStore(is_slow=True).swap)
            assert (await go_on(bench, events[-1].id)).status == 503
        bench.replica.go.clear()
        before = len(bench.replica.requests)
        running = asyncio.create_task(go_on(bench, events[-1].id))
        await eventually(lambda: len(bench.replica.requests) > before)
        await kept(bench)  # the first claim has been asked back as often as it may
        value = await store.get(events[-1].id.partition("/")[0])
        assert msgspec.msgpack.decode(value or b"", type=KeptStream).is_claimed
        bench.replica.go.set()
        assert (await running).status == 200


async def test_what_waits_to_be_written_is_bounded(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.compose.Stores.open_streams", lambda *_: BadStore(is_slow=True))
    monkeypatch.setattr("headrace.gateway.stores.guard.MAX_WRITING_BYTES", 1000)
    async with open_bench(text) as bench:
        equal(bench.replica)
        for _ in range(8):
            await send(bench.gateway, CHAT, BODY)
        assert 0 < bench.gateway.service.stages.kept_streams.num_writing < 8
        dropped = metric(bench.gateway, "headrace_streams_kept_total", outcome="dropped")
        assert dropped + bench.gateway.service.stages.kept_streams.num_writing == 8


async def test_an_entry_of_another_version_is_unknown(text: TextModel) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        store = _store(bench)
        answer_id = events[-1].id.partition("/")[0]
        value = await store.get(answer_id)
        newer = msgspec.structs.replace(msgspec.msgpack.decode(value or b"", type=KeptStream), form=99)
        for other in (msgspec.msgpack.encode(newer), b"\xc1 what is this"):
            await store.put(answer_id, other, tenant="default", ttl_s=60)
            assert (await go_on(bench, events[-1].id)).status == 404


async def test_a_stream_that_an_earlier_version_kept_goes_on_at_the_model_of_the_name(text: TextModel) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        events = await left(bench)
        answer_id = events[-1].id.partition("/")[0]
        *older, model = msgspec.msgpack.decode(await _store(bench).get(answer_id) or b"")
        assert model == MODEL
        await _store(bench).put(answer_id, msgspec.msgpack.encode(older), tenant="default", ttl_s=60)
        assert (await go_on(bench, events[-1].id)).status == 200


async def test_the_log_line_of_a_resume_names_the_stream(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "requests"
    async with open_bench(text, request_log=str(log)) as bench:
        equal(bench.replica)
        events = await left(bench)
        await go_on(bench, events[-1].id)
    first, second = [json.loads(line) for line in log.read_text().splitlines()]
    assert second["continued_id"] == first["request_id"] == events[0].id.partition("/")[0]
    assert first["outcome"] == "cancelled"
    assert 0 < first["completion_tokens"] < 12
    assert first["completion_tokens"] + second["completion_tokens"] == 12, "no token is in two lines"
    assert "num_resumes" not in second, "no engine was lost"
