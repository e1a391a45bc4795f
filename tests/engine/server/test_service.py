"""Tests gateways' streams at an engine: answers, cancels, fences, leases, heartbeats, drains. Real sockets, real loop, no model."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from patience import PATIENCE_S, eventually
from virtual_wire import linked_virtually
from wire_kit import Served, connected, read_all, read_updates, request, served

from headrace.core.adapters import AdapterSource
from headrace.core.errors import InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.ids import RequestId
from headrace.core.load import ClassLoad, EngineCounters, summed
from headrace.core.model_info import may_resume, numerics_digest
from headrace.core.request import PriorityClass
from headrace.core.speculation import NGRAM, SpeculativeConfig
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.engine import build
from headrace.engine.config import EngineConfig
from headrace.engine.server.service import describe_acceptance
from headrace.lab.fake_adapters import save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire import headrace_pb2 as pb
from headrace.wire.client import ConnectionState, ReplicaClient
from headrace.wire.codec import encode_cancel, encode_submit
from headrace.wire.service import CHANNEL_OPTIONS, CONNECT, DRAIN, PROTOCOL_VERSION, SNAPSHOT, Expectation, Handle
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.socket

SLOW = FakeOptions(step_seconds=0.02)
HASHED = FakeOptions(numerics={"weights": "ab"})
ENDLESS = 4000
LONG = 500
"""Tokens that at SLOW's pace outlast what happens beside them, on a machine that stands still for seconds too."""
UNKNOWN_FIELD = b"\xc0\x3e\x01"
"""Number 1000, of a later version."""


def stop_pacing(engine: Served) -> None:
    """From now on its steps take no time: what is left of LONG answers comes at once."""
    engine.runner.close()


async def num_first_tokens(stream: ReplicaStream) -> int:
    """Waits for the first update: one token, more where a late thread has merged updates."""
    first = await stream.__anext__()
    assert isinstance(first, SequenceUpdate)
    return len(first.token_ids)


async def test_many_requests_get_exactly_their_tokens() -> None:
    async with served(config=EngineConfig(model="fake", depth=2)) as engine, connected(engine) as replica:
        requests = [request(f"r{i}", tuple(range(5 + 7 * i)), seed=i, n=1 + i % 3, max_tokens=20 + i) for i in range(30)]
        answers = await asyncio.gather(*(read_all(replica.submit(one)) for one in requests))
        for one, answer in zip(requests, answers, strict=True):
            assert answer == {i: fake_answer(one, i, one.params.max_tokens or 0, engine.options) for i in range(one.params.n)}
        await eventually(lambda: engine.is_idle)
        assert replica.num_open == 0


async def test_one_sequence_of_several_is_resumed_alone_and_answers_under_its_index() -> None:
    async with served(HASHED) as engine, connected(engine) as replica:
        whole = request("r", n=4, max_tokens=20)
        said = fake_answer(whole, 2, 20, engine.options)
        part = whole.resumed(2, said[:7], engine.engine.info.numerics_digest)
        assert await read_all(replica.submit(part)) == {2: said[7:]}
        await eventually(lambda: engine.is_idle)


@pytest.mark.parametrize("digest", ["", "ab"])
@pytest.mark.parametrize("weights", ["", "cd"])
async def test_output_ids_of_a_replica_with_other_or_unknown_numerics_are_refused_and_may_be_sent_elsewhere(
    digest: str, weights: str
) -> None:
    async with served(FakeOptions(numerics={"weights": weights})) as engine, connected(engine) as replica:
        whole = request("r", max_tokens=20)
        with pytest.raises(Unavailable, match=r"output_ids: their numerics_digest is not its own, or not known yet"):
            await read_all(replica.submit(whole.resumed(0, [1, 2, 3], digest)))
        assert len((await read_all(replica.submit(whole)))[0]) == 20, "one that resumes nothing needs none"
        await eventually(lambda: engine.is_idle)


async def test_hello_tells_the_model_and_a_new_process_is_a_new_instance() -> None:
    async with served() as first, connected(first) as replica:
        assert replica.info is not None
        assert replica.info.model == first.engine.info
        assert replica.info.replica == "fake-0"
        instance = replica.info.instance_id
    async with served() as second, connected(second) as replica:
        assert replica.info is not None
        assert replica.info.instance_id != instance


async def test_a_weights_digest_that_is_learnt_later_reaches_every_gateway() -> None:
    async with served(FakeOptions(numerics={"weights": "", "dtype": "float32"})) as engine, connected(engine) as early:
        assert early.info is not None
        assert early.info.model.numerics_digest == ""
        engine.engine.info = engine.engine.info.with_weights_digest("ab")
        await eventually(lambda: early.info is not None and early.info.model == engine.engine.info)
        async with connected(engine) as late:
            assert late.info is not None
            assert late.info.model.numerics_digest == engine.engine.info.numerics_digest != ""


async def test_a_stream_keeps_the_numerics_of_its_replica_as_they_are_learnt_and_when_it_is_lost() -> None:
    """What a stream has said was said with them; the replica's own hello is forgotten with the connection."""
    options = FakeOptions(numerics={"weights": "", "dtype": "float32"}, step_seconds=SLOW.step_seconds)
    async with served(options) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", max_tokens=ENDLESS))
        await stream.__anext__()
        assert numerics_digest(stream.numerics) == ""
        engine.engine.info = engine.engine.info.with_weights_digest("ab")
        await eventually(lambda: stream.numerics["weights"] == "ab")
        await engine.service.stop()
        with pytest.raises(Unavailable):
            await read_all(stream)
        assert replica.info is None
        assert may_resume(numerics_digest(stream.numerics), engine.engine.info.numerics_digest)


async def test_adapters_that_change_reach_every_gateway_and_decide_which_requests_are_taken(tmp_path: Path) -> None:
    """The last of two changes is what counts, an empty list too; a request for files that the engine has not may be sent elsewhere."""
    a, b = (AdapterSource(name=name, path=str(save_fake_adapter(tmp_path / name, name.encode()))) for name in "ab")
    config = EngineConfig(model="fake", enable_lora=True, lora_modules=(a,))
    async with served(config=config) as engine, connected(engine) as early:
        assert early.info is not None
        assert set(early.info.model.adapters) == {"a"}

        def change(*sources: AdapterSource) -> dict[str, str]:
            engine.engine.set_adapters(sources)
            engine.service.announce()
            return dict(engine.engine.info.adapters)

        before = change(a, b)
        save_fake_adapter(tmp_path / "a", b"other weights")
        after = change(a)
        await eventually(lambda: early.info is not None and early.info.model.adapters == after)
        for name, digest in before.items():
            with pytest.raises(Unavailable, match=f"the adapter {name} was loaded again or unloaded"):
                await read_all(early.submit(replace(request("r"), adapter=name, adapter_digest=digest)))
        asked = replace(request("r"), adapter="a", adapter_digest=after["a"])
        assert await read_all(early.submit(asked)) == {0: fake_answer(asked, 0, 8, engine.options)}
        async with connected(engine) as late:
            assert late.info is not None
            assert late.info.model == engine.engine.info
        change()
        await eventually(lambda: early.info is not None and early.info.model.adapters == {})


class PeerDuringWhoseHello:
    """A gateway's call whose first read is its hello, and during whose first write `happens` is called; then it hangs up."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens
        self.frames: list[pb.EngineFrame] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> object:
        if not self.frames:
            return pb.ClientFrame(hello=pb.ClientHello(protocol_version=PROTOCOL_VERSION)).SerializeToString()
        await eventually(lambda: any(frame.weights_digest for frame in self.frames))
        return grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        self.frames.append(pb.EngineFrame.FromString(data))
        if len(self.frames) == 1:
            self.happens()


async def test_a_weights_digest_that_is_learnt_while_a_hello_is_written_reaches_that_gateway() -> None:
    async with served(FakeOptions(numerics={"weights": "", "dtype": "float32"})) as engine, connected(engine) as other:

        def learn() -> None:
            engine.engine.info = engine.engine.info.with_weights_digest("ab")
            engine.service.announce()

        peer = PeerDuringWhoseHello(learn)
        await engine.service._connect(None, peer)
        assert peer.frames[0].hello.model.numerics["weights"] == ""
        assert [frame.weights_digest for frame in peer.frames if frame.weights_digest] == ["ab"]
        await eventually(lambda: other.info is not None and other.info.model == engine.engine.info)


async def test_first_update_carries_queue_time_and_cached_tokens_and_the_last_one_the_end() -> None:
    async with served(FakeOptions(eos_after=4)) as engine, connected(engine) as replica:
        updates = await read_updates(replica.submit(request("r", max_tokens=100)))
        assert updates[0].queue_time_s is not None
        assert updates[0].num_cached_tokens == 0
        assert [update.finish for update in updates[:-1]] == [None] * (len(updates) - 1)
        assert updates[-1].finish is FinishReason.STOP
        assert updates[-1].stop_token_id == engine.options.eos_token_id


async def test_logprobs_and_paged_prompt_logprobs_arrive_complete_and_in_order() -> None:
    prompt = tuple(range(3000))
    async with served() as engine, connected(engine) as replica:
        updates = await read_updates(replica.submit(request("r", prompt, logprobs=2, prompt_logprobs=3)))
        entries = [entry for update in updates for entry in update.prompt_logprobs]
        assert [entry.token_id for entry in entries] == list(prompt[1:])
        assert {len(entry.top_ids) for entry in entries} == {3}
        chosen = [entry for update in updates for entry in update.logprobs]
        assert [entry.token_id for entry in chosen] == [token for update in updates for token in update.token_ids]


async def test_leaving_a_stream_early_frees_everything() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        async with replica.submit(request("r", n=3, max_tokens=ENDLESS)) as stream:
            await stream.__anext__()
        assert replica.num_open == 0
        await eventually(lambda: engine.is_idle)


async def test_cancel_ends_the_iterator() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", max_tokens=ENDLESS))
        await stream.__anext__()
        num_unread = stream.num_unread
        replica.cancel(RequestId("r"))
        assert len([update async for update in stream]) == num_unread, "nothing comes any more"
        await eventually(lambda: engine.is_idle)


async def test_a_stop_string_found_upstairs_ends_one_sequence_and_later_news_of_it_is_dropped() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", n=2, max_tokens=LONG))
        seen: dict[int, int] = {0: 0, 1: 0}
        stopped_at = 0
        while updates := await stream.batch():  # all that is unread: it stays readable after `finish`
            for update in updates:
                assert isinstance(update, SequenceUpdate)
                seen[update.index] += len(update.token_ids)
            if seen[0] >= 3 and not stopped_at:  # more than 3 where a late thread has merged updates
                stopped_at = seen[0]
                replica.finish(RequestId("r"), 0, 2, FinishReason.STOP)
                await eventually(lambda: "stop" in engine.engine.snapshot().counters.finished)
                stop_pacing(engine)
        assert seen == {0: stopped_at, 1: LONG}
        assert stopped_at < LONG
        await eventually(lambda: engine.is_idle)
        assert engine.engine.snapshot().counters.finished == {"stop": 1, "length": 1}


async def test_a_gateway_that_vanishes_takes_its_requests_with_it() -> None:
    async with served(SLOW) as engine, connected(engine) as stays:
        async with connected(engine) as leaves:
            for i in range(10):
                leaves.submit(request(f"l{i}", max_tokens=ENDLESS))
            one = request("kept", max_tokens=LONG)
            kept = stays.submit(one)
            await eventually(lambda: engine.engine.snapshot().num_running == 11)
        await eventually(lambda: engine.engine.snapshot().num_running == 1)
        stop_pacing(engine)
        assert (await read_all(kept))[0] == fake_answer(one, 0, LONG, engine.options)
        await eventually(lambda: engine.is_idle)


async def test_a_lost_engine_raises_unavailable_in_every_open_stream() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        streams = [replica.submit(request(f"r{i}", max_tokens=ENDLESS)) for i in range(3)]
        await streams[0].__anext__()
        await engine.service.stop()
        for stream in streams:
            with pytest.raises(Unavailable, match="can be sent again"):
                await read_all(stream)
        assert replica.state is ConnectionState.DOWN
        with pytest.raises(Unavailable):
            replica.submit(request("late"))


async def test_the_client_reconnects_when_the_engine_is_back() -> None:
    async with served() as engine, connected(engine) as replica:
        await engine.service.stop()
        await eventually(lambda: replica.state is ConnectionState.DOWN)
        await engine.service.start()
        await replica.wait_connected(PATIENCE_S)
        assert len((await read_all(replica.submit(request("again"))))[0]) == 8


async def test_the_engine_refuses_by_field_and_its_neighbours_go_on() -> None:
    config = EngineConfig(model="fake", max_num_seqs=1, max_waiting=2, max_num_batched_tokens=512)
    async with served(FakeOptions(step_seconds=0.02, vocab_size=100, max_model_len=1024), config) as engine, connected(engine) as replica:
        neighbour = replica.submit(request("ok", max_tokens=LONG))
        num_first = await num_first_tokens(neighbour)
        for bad, field in (
            (request("v", (100,)), "prompt"),
            (request("l", (7,) * 1024), "prompt"),
            (request("m", max_tokens=1024), "max_tokens"),
            (request("t", temperature=9.0), "temperature"),
            (request("p", top_p=float("nan")), "top_p"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await read_all(replica.submit(bad))
            assert caught.value.field == field
        waiting = [replica.submit(request(f"w{i}")) for i in range(3)]
        with pytest.raises(Overloaded):
            await read_all(waiting[-1])
        stop_pacing(engine)
        assert len((await read_all(neighbour))[0]) == LONG - num_first
        for stream in waiting[:2]:
            assert len((await read_all(stream))[0]) == 8


async def test_a_queue_full_of_bytes_refuses_the_next_prompt_with_a_time_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MAX_WAITING_BYTES", 2**16)
    config = EngineConfig(model="fake", max_num_seqs=1, max_num_batched_tokens=4096)
    options = FakeOptions(step_seconds=0.02, vocab_size=100, max_model_len=4096)
    async with served(options, config) as engine, connected(engine) as replica:
        neighbour = replica.submit(request("ok", max_tokens=LONG))
        num_first = await num_first_tokens(neighbour)
        waiting = [replica.submit(request(f"w{i}", (7,) * 1000, max_tokens=2)) for i in range(2)]
        with pytest.raises(Overloaded, match="of 65536 bytes") as refused:
            await read_all(waiting[-1])
        assert refused.value.retry_after_s > 0
        with pytest.raises(RequestTooLarge, match="at most 65536 bytes while it waits"):
            await read_all(replica.submit(request("big", (7,) * 2000, max_tokens=2)))
        stop_pacing(engine)
        assert len((await read_all(neighbour))[0]) == LONG - num_first
        assert len((await read_all(waiting[0]))[0]) == 2


async def test_a_gateway_reads_how_much_of_the_load_each_class_has() -> None:
    config = EngineConfig(model="fake", max_num_seqs=1, max_num_batched_tokens=512)
    async with served(FakeOptions(step_seconds=0.02), config) as engine, connected(engine) as replica:
        running = replica.submit(request("runs", max_tokens=ENDLESS, priority=PriorityClass.PREMIUM))
        await running.__anext__()
        for number in range(5):
            replica.submit(request(f"b{number}", (7,) * 10, max_tokens=2, priority=PriorityClass.BATCH))
        assert replica.sent_since_snapshot(PriorityClass.STANDARD) == []
        expected = (ClassLoad(1), ClassLoad(), ClassLoad(0, 5, 50))
        await eventually(lambda: replica.snapshot is not None and replica.snapshot.load.classes == expected)
        assert replica.snapshot is not None
        load = replica.snapshot.load
        assert summed(load.classes) == (load.num_running, load.num_waiting, load.num_queued_tokens)
        await engine.service.stop()


@pytest.mark.pure
def test_acceptance_is_described_by_what_was_counted_since_the_last_line() -> None:
    before = EngineCounters()
    before.note_verified(2, 2)
    after = before.copy()
    for num_drafts, num_accepted in ((4, 1), (4, 4), (1, 0)):
        after.note_verified(num_drafts, num_accepted)
    assert describe_acceptance(before, after, 10.0) == (
        "mean acceptance length 2.67, accepted 0.5 of 0.9 drafted tokens/s (5 of 9), "
        "acceptance by position 0.667 0.333 0.333 0.333, on average 55.6%"
    )


@pytest.mark.loop
async def test_acceptance_is_logged_every_ten_seconds_in_which_drafts_were_computed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(model="fake", speculative_config=SpeculativeConfig(method=NGRAM))
    async with linked_virtually(config, options=FakeOptions(step_seconds=0.01)) as (engine, replica):

        def logged() -> list[tuple[int, int]]:
            lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("drafts: mean")]
            return [(int(right), int(drafted)) for line in lines for right, drafted in re.findall(r"\((\d+) of (\d+)\)", line)]

        await asyncio.sleep(30.0)
        assert not logged()
        began = engine.loop.time()
        await read_updates(replica.submit(request("r", max_tokens=3000)))
        took_s = engine.loop.time() - began
        await asyncio.sleep(30.0)
        counters = engine.engine.snapshot().counters
        assert tuple(map(sum, zip(*logged(), strict=True))) == (counters.accepted_tokens, counters.draft_tokens)
        assert 2 <= took_s // 10 <= len(logged()) <= took_s // 10 + 2


@pytest.mark.loop
async def test_a_passed_deadline_ends_the_request() -> None:
    async with linked_virtually(step_s=0.02) as (engine, replica):
        deadline_at = engine.loop.time() + 0.21
        updates = await read_updates(replica.submit(request("r", max_tokens=ENDLESS, deadline_at=deadline_at)))
        assert updates[-1].finish is FinishReason.DEADLINE
        assert 0.0 <= engine.loop.time() - deadline_at <= 0.02
        await eventually(lambda: engine.is_idle)


async def test_draining_takes_no_new_work_and_lets_running_streams_finish() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", max_tokens=LONG))
        num_first = await num_first_tokens(stream)
        engine.service.drain("stopping")
        await eventually(lambda: replica.state is ConnectionState.DRAINING)
        with pytest.raises(Unavailable, match="draining"):
            replica.submit(request("late"))
        stop_pacing(engine)
        assert len((await read_all(stream))[0]) == LONG - num_first
        assert await engine.service.drained(PATIENCE_S)


async def test_what_was_written_before_the_engine_left_can_be_read_afterwards() -> None:
    """A gateway that stood still for a moment lost the end of its answers: the call was cancelled, and gRPC drops what waits in one."""
    async with served() as engine, RawStream(engine) as call:
        await send(call, encode_submit(request("r", max_tokens=20), Handle(1)))
        await eventually(lambda: "length" in engine.engine.snapshot().counters.finished)
        engine.service.drain("stopping")
        assert await engine.service.drained(PATIENCE_S)
        await engine.service.stop()
        num_tokens = 0
        while (data := await call.read()) is not grpc.aio.EOF:
            num_tokens += sum(pb.EngineFrame.FromString(data).updates.token_counts)
        assert num_tokens == 20
        assert await call.code() is grpc.StatusCode.OK


async def test_a_submit_that_crosses_a_drain_is_rejected_as_unavailable() -> None:
    async with served() as engine, RawStream(engine) as call:
        engine.service.drain("stopping")
        await send(call, encode_submit(request("late"), Handle(1)))
        rejected = (await frame_with(call, "rejected")).rejected[0]
        assert rejected.kind == pb.REJECT_UNAVAILABLE


async def test_heartbeats_tell_of_a_step_that_hangs() -> None:
    options = FakeOptions(stall_after_steps=3)
    async with served(options) as engine, connected(engine) as replica:
        replica.submit(request("r", max_tokens=ENDLESS))
        await eventually(lambda: replica.snapshot is not None and (replica.snapshot.load.step_age_s or 0) > 0.5)
        assert replica.state is ConnectionState.CONNECTED
        replica.cancel(RequestId("r"))


async def test_every_gateway_reads_the_same_counts_of_steps_whenever_it_came() -> None:
    async with served(FakeOptions(step_seconds=0.001)) as engine:
        counters = engine.engine.scheduler.sequences.counters

        def has_all(replica: ReplicaClient) -> bool:
            seen = replica.snapshot
            return seen is not None and seen.load.counters == counters and sum(counters.step_buckets) == counters.steps

        async with connected(engine) as first, connected(engine) as second:
            await read_all(first.submit(request("r", max_tokens=50)))
            await eventually(lambda: counters.steps >= 50 and has_all(first) and has_all(second))
        async with connected(engine) as late:
            await eventually(lambda: has_all(late))


async def test_what_was_sent_since_the_snapshot_is_counted_until_one_includes_it() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        await eventually(lambda: replica.snapshot is not None)
        for i in range(3):
            replica.submit(request(f"r{i}", (1, 2, 3, 4), max_tokens=ENDLESS))
        assert replica.sent_since_snapshot() == [4, 4, 4]
        await eventually(lambda: not replica.sent_since_snapshot())
        assert replica.snapshot is not None
        assert replica.snapshot.load.num_running + replica.snapshot.load.num_waiting == 3


# hellos and tokens


@pytest.mark.parametrize(
    ("expect", "word"),
    [
        (Expectation(digests={"tokenizer": "other"}), "tokenizer digest"),
        (Expectation(digests={"template": "other"}), "template digest"),
        (Expectation(vocab_size=7), "vocabulary"),
    ],
)
async def test_a_model_that_does_not_fit_is_refused_by_name(expect: Expectation, word: str) -> None:
    options = FakeOptions(digests={"tokenizer": "aa", "template": "bb"})
    async with served(options) as engine, ReplicaClient(engine.address, expect=expect) as replica:
        await eventually(lambda: word in replica.reason)
        assert replica.state is ConnectionState.DOWN
        with pytest.raises(Unavailable, match=word):
            replica.submit(request("r"))


async def test_equal_digests_and_unknown_kinds_fit() -> None:
    options = FakeOptions(digests={"tokenizer": "aa"})
    expect = Expectation(digests={"tokenizer": "aa", "model": "only here"}, vocab_size=options.vocab_size)
    async with served(options) as engine, connected(engine, expect=expect) as replica:
        assert replica.state is ConnectionState.CONNECTED


OTHER_VERSIONS = pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])


@OTHER_VERSIONS
async def test_a_gateway_of_another_protocol_version_is_refused_by_name(version: int) -> None:
    said = f"the gateway speaks {version}, this side {PROTOCOL_VERSION}"
    async with served() as engine, connected(engine) as neighbour:
        async with RawStream(engine, version=version) as call:
            await expect_status(call, grpc.StatusCode.FAILED_PRECONDITION, said)
        assert len((await read_all(neighbour.submit(request("n"))))[0]) == 8


@OTHER_VERSIONS
async def test_a_gateway_says_that_the_engine_refused_its_protocol_version(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wire.session.PROTOCOL_VERSION", version)
    async with served() as engine, ReplicaClient(engine.address) as replica:
        await eventually(lambda: f"the gateway speaks {version}, this side {PROTOCOL_VERSION}" in replica.reason)
        assert replica.state is ConnectionState.DOWN


@OTHER_VERSIONS
async def test_an_engine_of_another_protocol_version_is_refused_by_name(version: int) -> None:
    """It may be one that lets this gateway in: then the gateway refuses, and its reason says what a rollout takes."""
    async with served() as engine:
        engine.service.hello.protocol_version = version
        async with ReplicaClient(engine.address) as replica:
            await eventually(lambda: f"the engine speaks {version}, this side {PROTOCOL_VERSION}" in replica.reason)
            assert "a rollout across protocol versions takes a restart" in replica.reason
            with pytest.raises(Unavailable, match="protocol version"):
                replica.submit(request("r"))


@pytest.mark.parametrize("more", [UNKNOWN_FIELD, UNKNOWN_FIELD * 5_000], ids=["one", "many"])
async def test_what_a_hello_asks_beyond_this_version_is_refused_by_name(more: bytes) -> None:
    """A gateway that expects of its replicas what this engine does not know must not be told that it fits. Its neighbours go on."""
    async with served() as engine, connected(engine) as neighbour:
        async with RawStream(engine, version=None) as call:
            hello = pb.ClientHello.FromString(pb.ClientHello(protocol_version=PROTOCOL_VERSION).SerializeToString() + more)
            await call.write(pb.ClientFrame(hello=hello).SerializeToString())
            await expect_status(
                call, grpc.StatusCode.INVALID_ARGUMENT, f"hello: fields [1000] are not of protocol version {PROTOCOL_VERSION}"
            )
        assert len((await read_all(neighbour.submit(request("n"))))[0]) == 8


async def test_a_hello_of_another_version_is_refused_for_that_whatever_else_it_holds() -> None:
    async with served() as engine, RawStream(engine, version=None) as call:
        hello = pb.ClientHello.FromString(pb.ClientHello(protocol_version=PROTOCOL_VERSION + 1).SerializeToString() + UNKNOWN_FIELD)
        await call.write(pb.ClientFrame(hello=hello).SerializeToString())
        await expect_status(call, grpc.StatusCode.FAILED_PRECONDITION, "protocol version")


async def test_a_token_is_needed_where_one_is_set() -> None:
    token = "0123456789abcdef"
    async with served(token=token) as engine:
        async with ReplicaClient(engine.address, token=token[:-1] + "x") as stranger:
            await eventually(lambda: "token" in stranger.reason)
            assert stranger.state is ConnectionState.DOWN
        async with connected(engine, token=token) as replica:
            assert len((await read_all(replica.submit(request("r"))))[0]) == 8
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await call_control(engine, DRAIN, pb.DrainRequest())


# frames that should not be


async def test_a_newer_epoch_replaces_the_older_attempt_and_an_older_one_is_refused() -> None:
    async with served(SLOW) as engine, RawStream(engine) as call:
        await send(call, encode_submit(request("r", epoch=1, max_tokens=ENDLESS), Handle(1)))
        await frame_with(call, "updates")
        await send(call, encode_submit(request("r", epoch=1), Handle(2)), encode_submit(request("r", epoch=0), Handle(3)))
        refused: list[pb.Rejected] = []
        while len(refused) < 2:
            refused.extend((await frame_with(call, "rejected")).rejected)
        assert {(r.handle, r.field) for r in refused} == {(2, "epoch"), (3, "epoch")}
        await send(call, encode_submit(request("r", epoch=2, max_tokens=3), Handle(4)))
        frame = await frame_with(call, "updates")
        while 4 not in frame.updates.handles:
            frame = await frame_with(call, "updates")
        while not frame.updates.finished:
            frame = await frame_with(call, "updates")
            assert set(frame.updates.handles) == {4}
        await eventually(lambda: engine.is_idle)


async def test_a_request_sent_again_after_its_cancel_hears_nothing_of_the_cancelled_one() -> None:
    """The same id, the same epoch, another handle, all in one frame: the end of the first one is not the end of the second."""
    async with served(SLOW) as engine, RawStream(engine) as call:
        await send(call, encode_submit(request("r", max_tokens=ENDLESS), Handle(1)))
        await frame_with(call, "updates")
        again = encode_submit(request("r", max_tokens=5), Handle(3))
        await send(
            call,
            encode_cancel(Handle(1)),
            encode_submit(request("r", max_tokens=ENDLESS), Handle(2)),
            encode_cancel(Handle(2)),
            again,
        )
        said: list[int] = []
        while True:
            updates = (await frame_with(call, "updates")).updates
            said += [
                handle for handle, count in zip(updates.handles, updates.token_counts, strict=True) for _ in range(count) if handle > 1
            ]
            if ends := [(updates.handles[row.row], row.reason) for row in updates.finished]:
                break
        assert ends == [(3, pb.FINISH_LENGTH)]
        assert said == [3] * 5
        await eventually(lambda: engine.is_idle)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (pb.Submit(task=pb.TASK_EMBED), "task"),
        (pb.Submit(grammar=pb.Grammar(source="x")), "grammar"),
        (pb.Submit(kv_ticket=b"k"), "kv_ticket"),
        (pb.Submit(modality_digests=[b"m"]), "modality_digests"),
        (pb.Submit.FromString(UNKNOWN_FIELD), "submit"),
        (pb.Submit(params=pb.Params.FromString(UNKNOWN_FIELD)), "submit"),
        (pb.Submit(grammar=pb.Grammar.FromString(b"\x08\x01" + UNKNOWN_FIELD)), "submit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_a_submit_asks_beyond_this_version_is_refused_by_name_and_alone(change: pb.Submit, field: str) -> None:
    async with served() as engine, RawStream(engine) as call:
        asked, plain = encode_submit(request("r"), Handle(1)), encode_submit(request("s"), Handle(2))
        asked.submit.MergeFrom(change)
        await send(call, asked, plain)
        frame = await frame_with(call, "rejected")
        rejected = frame.rejected[0]
        assert (rejected.handle, rejected.kind, rejected.field) == (1, pb.REJECT_INVALID, field)
        assert f"protocol version {PROTOCOL_VERSION}" in rejected.limit
        assert "1000" in rejected.value or field != "submit"
        if not frame.HasField("updates"):  # both may come in one frame
            frame = await frame_with(call, "updates")
        assert set(frame.updates.handles) == {2}


def damaged_submit(**fields: object) -> pb.Command:
    command = encode_submit(request("r"), Handle(1))
    for name, value in fields.items():
        setattr(command.submit, name, value)
    return command


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff",
        pb.ClientFrame(commands=[pb.Command()]).SerializeToString(),
        pb.ClientFrame(commands=[damaged_submit(handle=0)]).SerializeToString(),
        pb.ClientFrame(commands=[damaged_submit(request_id="")]).SerializeToString(),
        pb.ClientFrame(commands=[encode_submit(request("a"), Handle(5)), encode_submit(request("b"), Handle(5))]).SerializeToString(),
        pb.ClientFrame(commands=[pb.Command(finish=pb.Finish(handle=1))]).SerializeToString(),
        UNKNOWN_FIELD,
        UNKNOWN_FIELD * 5_000,
        pb.ClientFrame(commands=[pb.Command.FromString(encode_cancel(Handle(1)).SerializeToString() + UNKNOWN_FIELD)]).SerializeToString(),
        pb.ClientFrame(commands=[pb.Command(cancel=pb.Cancel.FromString(UNKNOWN_FIELD))]).SerializeToString(),
        pb.ClientFrame(
            commands=[pb.Command(finish=pb.Finish.FromString(pb.Finish(reason=pb.FINISH_STOP).SerializeToString() + UNKNOWN_FIELD))]
        ).SerializeToString(),
    ],
    ids=[
        "not protobuf",
        "empty command",
        "no handle",
        "no id",
        "handle used twice",
        "no reason",
        "unknown field of a frame",
        "thousands of them",
        "of a command",
        "of a cancel",
        "of a finish",
    ],
)
async def test_a_malformed_frame_ends_its_stream_alone(frame: bytes) -> None:
    async with served(SLOW) as engine, connected(engine) as neighbour:
        stream = neighbour.submit(request("n", max_tokens=LONG))
        async with RawStream(engine) as call:
            await call.write(frame)
            await expect_status(call, grpc.StatusCode.INVALID_ARGUMENT, "")
        stop_pacing(engine)
        assert len((await read_all(stream))[0]) == LONG
        await eventually(lambda: engine.is_idle)


async def test_a_stream_must_begin_with_a_hello() -> None:
    async with served() as engine, RawStream(engine, version=None) as call:
        await send(call, encode_submit(request("r"), Handle(1)))
        await expect_status(call, grpc.StatusCode.INVALID_ARGUMENT, "hello")


async def test_commands_for_unknown_handles_are_harmless() -> None:
    async with served() as engine, RawStream(engine) as call:
        finish = pb.Command(finish=pb.Finish(handle=99, index=3, keep_tokens=1, reason=pb.FINISH_STOP))
        await send(call, encode_cancel(Handle(98)), finish, encode_submit(request("r"), Handle(1)))
        frame = await frame_with(call, "updates")
        assert set(frame.updates.handles) == {1}


async def test_a_gateway_that_does_not_read_loses_its_lease_and_its_requests() -> None:
    options = FakeOptions(step_seconds=0.002, verify=False)
    async with served(options, max_unread=2000, lease_s=2.0) as engine, connected(engine) as neighbour:
        async with RawStream(engine) as call:
            many = [encode_submit(request(f"q{i}", max_tokens=ENDLESS, logprobs=20), Handle(i + 1)) for i in range(8)]
            await send(call, *many)
            await eventually(lambda: engine.service.num_open == 8)
            await eventually(lambda: engine.service.num_open == 0)
            await expect_status(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "lease")
        assert len((await read_all(neighbour.submit(request("n"))))[0]) == 8
        await eventually(lambda: engine.is_idle)


# operators


async def test_control_shows_the_load_and_drains() -> None:
    async with served(SLOW) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", max_tokens=LONG))
        num_first = await num_first_tokens(stream)
        seen = pb.SnapshotReply.FromString(await call_control(engine, SNAPSHOT, pb.SnapshotRequest()))
        assert (seen.num_streams, seen.num_open, seen.draining, seen.hello.replica) == (1, 1, False, "fake-0")
        assert seen.load.num_running == 1
        assert pb.DrainReply.FromString(await call_control(engine, DRAIN, pb.DrainRequest())).num_open == 1
        await eventually(lambda: replica.state is ConnectionState.DRAINING)
        stop_pacing(engine)
        assert len((await read_all(stream))[0]) == LONG - num_first


@pytest.mark.parametrize(("method", "message"), [(DRAIN, UNKNOWN_FIELD), (SNAPSHOT, UNKNOWN_FIELD), (DRAIN, b"\xff"), (SNAPSHOT, b"\xff")])
async def test_what_an_operator_asks_beyond_this_version_is_refused_and_not_done(method: str, message: bytes) -> None:
    async with served() as engine, connected(engine) as replica:
        async with grpc.aio.insecure_channel(engine.address, options=CHANNEL_OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await channel.unary_unary(method)(message)
        assert len((await read_all(replica.submit(request("n"))))[0]) == 8, "it does not drain"


# a gateway by hand


class RawStream:
    """A stream without ReplicaClient. version: of its hello; None sends none."""

    def __init__(self, engine: Served, version: int | None = PROTOCOL_VERSION) -> None:
        # A fixed, small window: what a reader that stopped reading is sent ahead would grow to megabytes otherwise.
        window: tuple[tuple[str, int | str], ...] = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
        self._channel = grpc.aio.insecure_channel(engine.address, options=(*CHANNEL_OPTIONS, *window))
        self._version = version

    async def __aenter__(self) -> Any:
        call = self._channel.stream_stream(CONNECT)()
        if self._version is not None:
            hello = pb.ClientHello(protocol_version=self._version, client="by hand")
            await call.write(pb.ClientFrame(hello=hello).SerializeToString())
        if self._version == PROTOCOL_VERSION:
            assert pb.EngineFrame.FromString(await call.read()).HasField("hello")
        return call

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()


async def send(call: Any, *commands: pb.Command) -> None:
    await call.write(pb.ClientFrame(commands=commands).SerializeToString())


async def frame_with(call: Any, field: str) -> pb.EngineFrame:
    """The next frame that has `field`. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            frame = pb.EngineFrame.FromString(await call.read())
            if any(descriptor.name == field for descriptor, _ in frame.ListFields()):
                return frame


async def expect_status(call: Any, code: grpc.StatusCode, word: str) -> None:
    """Reads what was still sent, then the stream's end."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while (await call.read()) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        assert await call.code() is code
        assert word in await call.details()


async def call_control(engine: Served, method: str, message: Any) -> bytes:
    async with grpc.aio.insecure_channel(engine.address, options=CHANNEL_OPTIONS) as channel:
        reply: bytes = await channel.unary_unary(method)(message.SerializeToString())
        return reply
