"""Tests that sequences cut at any token on one replica go on at another as if nothing had happened: token ids, text, log-probabilities.

Two engines of the bundled model, each behind the real service on a Unix socket. What is sent again are the ids that the text side was fed,
held-back ones (the beginning of what may be a stop string, half a character) included.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from wire_kit import PATIENCE_S, socket_dir, until

pytest.importorskip("numba")

from headrace.bundled import bundled_path
from headrace.core.ids import RequestId
from headrace.core.model_info import may_resume
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.engine.build import build_served_engine
from headrace.engine.config import EngineConfig
from headrace.engine.server.dispatcher import AsyncioOutbox
from headrace.engine.server.service import EngineService
from headrace.text.assemble import OutputAssembler
from headrace.text.folder import load_text
from headrace.text.tokenizer import Tokenizer
from headrace.wire.client import ReplicaClient
from headrace.wire.target import parse_target

pytestmark = pytest.mark.socket

FOLDER = bundled_path("headrace-tiny")
N = 4
QUESTIONS = ("What is a mill?", "Tell me a story about a river.", "Why is the sky blue?")


@asynccontextmanager
async def replica(name: str, address: str) -> AsyncIterator[ReplicaClient]:
    config = EngineConfig(
        model=str(FOLDER), deterministic=True, dtype="float32", num_threads=1, num_kv_blocks=400, max_num_seqs=16, depth=2
    )
    bridge = AsyncioOutbox(asyncio.get_running_loop())
    engine = await asyncio.to_thread(build_served_engine, config, bridge)
    service = EngineService(engine, bridge, parse_target(address), replica=name)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    await service.start()
    try:
        async with ReplicaClient(address, name=name) as client:
            await client.wait_connected(PATIENCE_S)
            yield client
            await until(lambda: service.num_open == 0)
    finally:
        await service.stop()
        engine.stop()
        await asyncio.to_thread(thread.join, PATIENCE_S)
        engine.scheduler.check()


@dataclass
class Reader:
    """One sequence as the gateway reads it. fed: ids given to the assembler, a resume's own; they may be more than were shown."""

    tokenizer: Tokenizer
    params: SamplingParams
    fed: list[int] = field(default_factory=list)
    text: str = ""
    shown: list[Any] = field(default_factory=list)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.assembler = OutputAssembler(self.tokenizer, self.params)

    def feed(self, update: SequenceUpdate) -> None:
        self.fed += update.token_ids
        delta = self.assembler.feed(update)
        self.text += delta.text
        self.shown += [(entry.token_id, entry.logprob, entry.rank, entry.text_offset, entry.top) for entry in delta.logprobs or ()]
        self.finish = delta.finish

    @property
    def answer(self) -> object:
        return self.text, self.shown, self.finish


async def read(client: ReplicaClient, request: EngineRequest, readers: dict[int, Reader], cuts: dict[int, int]) -> None:
    """Feeds the readers until each has ended or has been fed as many ids as its cut says; then the client leaves."""
    open_ones = set(request.indices)
    async with client.submit(request) as stream:
        async for update in stream:
            assert isinstance(update, SequenceUpdate), update
            index = update.index
            if index not in open_ones:
                continue
            for part in single_tokens(update):
                readers[index].feed(part)
                if readers[index].finish is not None or len(readers[index].fed) >= cuts.get(index, 10**6):
                    open_ones.discard(index)
                    client.finish(request.request_id, index, len(readers[index].fed), FinishReason.STOP)
                    break
            if not open_ones:
                return


def single_tokens(update: SequenceUpdate) -> list[SequenceUpdate]:
    """The same token by token, so that a cut may fall anywhere; the end goes with the last one."""
    count = len(update.token_ids)
    if count <= 1:
        return [update]
    parts = [
        update._replace(token_ids=(token,), logprobs=update.logprobs[i : i + 1], finish=None, stop_token_id=None)
        for i, token in enumerate(update.token_ids)
    ]
    parts[-1] = parts[-1]._replace(finish=update.finish, stop_token_id=update.stop_token_id)
    return parts


def sampled(number: int, prompt: tuple[int, ...]) -> EngineRequest:
    params = SamplingParams(
        n=N, seed=100 + number, temperature=1.0, top_p=0.95, max_tokens=40, min_tokens=10, logprobs=2, presence_penalty=0.4,
        frequency_penalty=0.3, repetition_penalty=1.1, stop=("the end", ". A", "qu", "is a "),
    )  # fmt: skip
    return EngineRequest(request_id=RequestId(f"whole-{number}"), prompt_ids=prompt, params=params)


async def test_every_sequence_cut_anywhere_goes_on_at_another_replica_as_if_it_had_not_been() -> None:
    assert FOLDER is not None
    tokenizer = load_text(FOLDER).tokenizer
    draw = random.Random(5)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(socket_dir())
        first, second = [await stack.enter_async_context(replica(name, f"unix:{folder}/{name}.sock")) for name in ("a", "b")]
        await until(lambda: all(one.info and one.info.model.numerics_digest for one in (first, second)))
        assert first.info is not None
        assert second.info is not None
        numerics_digest = first.info.model.numerics_digest
        assert may_resume(numerics_digest, second.info.model.numerics_digest)
        num_cut = num_held_back = 0
        for number, question in enumerate(QUESTIONS):
            whole = sampled(number, tuple(tokenizer.encode(question, add_special_tokens=True)))
            unbroken = {index: Reader(tokenizer, whole.params) for index in whole.indices}
            await read(first, whole, unbroken, {})
            assert all(reader.finish is not None for reader in unbroken.values())

            cuts = {index: draw.randrange(1, len(reader.fed)) for index, reader in unbroken.items() if len(reader.fed) > 1}
            broken = {index: Reader(tokenizer, whole.params) for index in whole.indices}
            await read(first, replace(whole, request_id=RequestId(f"cut-{number}")), broken, cuts)
            for index, reader in broken.items():
                if reader.finish is not None:
                    continue
                num_cut += 1
                num_held_back += len(reader.fed) > len(reader.shown)
                part = whole.resumed(index, reader.fed, numerics_digest)
                await read(second, replace(part, request_id=RequestId(f"rest-{number}-{index}")), {index: reader}, {})
            for index in whole.indices:
                assert broken[index].fed == unbroken[index].fed
                assert broken[index].answer == unbroken[index].answer, (question, index, cuts)
        assert num_cut >= 2 * N, "most answers were long enough to be cut"
        assert num_held_back > 0, "some were cut while a token waited for its text"
