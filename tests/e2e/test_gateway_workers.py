"""Tests several gateway processes on one port, as `headrace serve` starts them; the engine is real but for its model, which is paced.

The tests of this file share a deployment; the last one stops it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_kit import COMPLETIONS, Answer, Connection, ask, request_bytes, stream
from plain_loop import Checkpoint
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from server_kit import CROWD, CROWD_ENGINE, PATIENCE_S, STEP_S, Server, is_alive, serving_fake

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.lab.fake_runner import FakeOptions, fake_answer

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7, 8)
WORKERS = 2
NUM_STREAMS = 30
NUM_TOKENS = 150
"""Of a stream in whose middle something happens."""


@pytest.fixture(scope="module")
def workers(random_folder: Path) -> Iterator[Server]:
    gateway = {"workers": WORKERS, "request_log": "{folder}/requests.jsonl"}
    with serving_fake(random_folder, fake={**CROWD, "step_seconds": STEP_S}, engine=CROWD_ENGINE, gateway=gateway) as server:
        yield server


def body(seed: int, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {"model": "fake", "prompt": list(PROMPT), "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}


def expected_text(checkpoint: Checkpoint, seed: int) -> str:
    request = EngineRequest(request_id=RequestId("x"), prompt_ids=PROMPT, params=SamplingParams(seed=seed))
    return checkpoint.plain.text(fake_answer(request, 0, NUM_TOKENS, FakeOptions(**CROWD)))


async def try_stream(server: Server, seed: int) -> Answer | Exception:
    try:
        return await stream(server.port, COMPLETIONS, body(seed))
    except (OSError, asyncio.IncompleteReadError) as error:
        return error


class Page:
    """A page of /metrics. A worker that does not answer within a second is left out, and the page says so."""

    def __init__(self, server: Server) -> None:
        status, text = server.get("/metrics")
        assert status == 200
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append(sample)

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self._samples[name] if labels.items() <= sample.labels.items())

    def by_worker(self, name: str, **labels: str) -> list[float]:
        return [self.total(name, worker=str(index), **labels) for index in range(WORKERS)]

    @property
    def is_whole(self) -> bool:
        return self.by_worker("headrace_gateway_worker_up") == [1] * WORKERS


def whole_page(server: Server) -> Page:
    pages: list[Page] = []

    def is_whole() -> bool:
        pages.append(Page(server))
        return pages[-1].is_whole

    server.until(is_whole)
    return pages[-1]


def shows(server: Server, count: int, name: str) -> bool:
    """A worker that is late may show less for a while; more would be counted twice."""
    total = whole_page(server).total(name)
    assert total <= count
    return total == count


async def asked_until(server: Server, condition: Callable[[], bool]) -> None:
    """Requests on new connections, each of which is answered, until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            answers = await asyncio.gather(*(ask(server.port, "POST", COMPLETIONS, body(0, 1)) for _ in range(10)))
            assert {answer.status for answer in answers} == {200}


async def test_any_worker_shows_and_logs_the_requests_of_all(workers: Server) -> None:
    answers = await asyncio.gather(*(ask(workers.port, "POST", COMPLETIONS, body(seed, 4)) for seed in range(60)))
    assert {answer.status for answer in answers} == {200}
    await workers.eventually(lambda: shows(workers, 60, "headrace_requests_total"))
    pages: list[Page] = []

    def are_whole() -> bool:
        """A worker that is late for a page is left out of it, and in the next try it is not."""
        pages[:] = [Page(workers) for _ in range(12)]
        return all(page.is_whole for page in pages)

    await workers.eventually(are_whole)
    counts = pages[0].by_worker("headrace_requests_total", outcome="length")
    assert (sum(counts), min(counts) > 0) == (60, True), counts
    assert [page.total("headrace_requests_total") for page in pages] == [60] * 12, "each from a worker of its own"
    await workers.eventually(lambda: shows(workers, 240, "headrace_generation_tokens_total"))
    await workers.eventually(lambda: (workers.folder / "requests.jsonl").read_text().count("\n") == 60)
    lines = [json.loads(line) for line in (workers.folder / "requests.jsonl").read_text().splitlines()]
    assert {line["request_id"] for line in lines} == {answer.headers["x-request-id"] for answer in answers}
    assert [sum(line["worker"] == index for line in lines) for index in range(WORKERS)] == counts


def server_load(server: Server) -> int:
    """What /load says: less than what runs where a worker does not answer within a second, never more."""
    status, load = server.get("/load")
    assert (status, list(load)) == (200, ["server_load"])
    assert load["server_load"] <= NUM_STREAMS
    return int(load["server_load"])


async def test_a_killed_worker_costs_its_own_streams_alone_and_comes_back(workers: Server, random_checkpoint: Checkpoint) -> None:
    running = [asyncio.create_task(try_stream(workers, seed)) for seed in range(NUM_STREAMS)]
    await workers.eventually(lambda: workers.load().num_running == NUM_STREAMS)
    with workers.stopped("e0"):  # nothing ends while it is counted
        await workers.eventually(lambda: server_load(workers) == NUM_STREAMS)
        lost = int((await asyncio.to_thread(whole_page, workers)).total("headrace_gateway_requests_open", worker="1"))
        pid = workers.pids()["gateway-1"]
        os.kill(pid, signal.SIGKILL)
        # Until its last thread has ended, the kernel may still hand connections to it.
        await workers.eventually(lambda: "gateway-1 was killed by SIGKILL" in workers.log)
    await workers.eventually(lambda: workers.get("/ready?strict")[0] == 200)
    await asked_until(workers, lambda: workers.pids().get("gateway-1", pid) != pid)
    await asked_until(workers, lambda: workers.metric("headrace_gateway_worker_up", worker="1") == 1)
    ended = await asyncio.gather(*running)
    cut = [answer for answer in ended if not isinstance(answer, Answer) or not answer.is_done]
    assert len(cut) == lost > 0
    assert not [answer.error for answer in cut if isinstance(answer, Answer) and answer.error], "the connection ends, nothing is said"
    for seed, answer in enumerate(ended):
        if isinstance(answer, Answer) and answer.is_done:
            assert answer.text[0] == expected_text(random_checkpoint, seed)
    await workers.eventually(lambda: workers.load().is_idle)


async def test_sigterm_lets_the_streams_of_every_worker_finish_refuses_new_work_and_ends_clean(
    workers: Server, random_checkpoint: Checkpoint
) -> None:
    """The last of `workers`: its processes are gone afterwards."""
    pids = workers.pids()
    await asked_until(workers, lambda: min(whole_page(workers).by_worker("headrace_requests_total", outcome="length")) > 0)
    running = [asyncio.create_task(try_stream(workers, seed)) for seed in range(NUM_STREAMS)]
    await workers.eventually(lambda: workers.load().num_running == NUM_STREAMS)
    with workers.stopped("e0"):
        open_by_worker = (await asyncio.to_thread(whole_page, workers)).by_worker("headrace_gateway_requests_open")
        assert min(open_by_worker) > 0, open_by_worker
        async with Connection(workers.port) as kept:
            await kept.send(request_bytes("GET", "/live", close=False))
            assert (await kept.reply()).status == 200
            workers.process.send_signal(signal.SIGTERM)
            await workers.eventually(lambda: len(drained(workers)) == WORKERS)
            assert workers.get("/ready")[1]["reason"] == "draining"
            await kept.send(request_bytes("POST", COMPLETIONS, body(0, 1)))
            refused = await kept.reply()
            assert refused.status == 503
            assert refused.headers["retry-after"]
    ended = await asyncio.gather(*running)
    assert [answer.text[0] for answer in ended if isinstance(answer, Answer)] == [
        expected_text(random_checkpoint, seed) for seed in range(NUM_STREAMS)
    ]
    assert await asyncio.to_thread(workers.process.wait, PATIENCE_S) == 0
    assert not [name for name, pid in pids.items() if is_alive(pid)]
    assert drained(workers) == [(f"gateway-{index}", str(int(count))) for index, count in enumerate(open_by_worker)]


def drained(server: Server) -> list[tuple[str, str]]:
    return sorted(re.findall(r'"process":"(gateway-\d)"[^\n]*draining (\d+) request', server.log))
