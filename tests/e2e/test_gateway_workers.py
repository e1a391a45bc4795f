"""Several gateway processes on one port, as `headrace serve` starts them; the engine is real but for its model, which is paced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_kit import COMPLETIONS, Answer, ask, stream
from plain_loop import Checkpoint
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from server_kit import CROWD, CROWD_ENGINE, KEY, LIVELY_S, Server, is_alive, serving, serving_fake

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.lab.fake_runner import FakeOptions, fake_answer

PROMPT = (5, 6, 7, 8)
WORKERS = 3
NUM_TOKENS = 200
"""Of a stream in whose middle something happens: ten seconds, so that it has a middle on a machine that stands still."""


@pytest.fixture
def workers(random_folder: Path) -> Iterator[Server]:
    gateway = {"workers": WORKERS, "request_log": "{folder}/requests.jsonl"}
    with serving_fake(random_folder, fake={**CROWD, "step_seconds": 0.05}, engine=CROWD_ENGINE, gateway=gateway) as server:
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
        """Of the samples with these labels; 0 when there is none."""
        return sum(sample.value for sample in self._samples[name] if labels.items() <= sample.labels.items())

    def by_worker(self, name: str, **labels: str) -> list[float]:
        return [self.total(name, worker=str(index), **labels) for index in range(WORKERS)]

    @property
    def is_whole(self) -> bool:
        """Every worker is on it."""
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
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        answers = await asyncio.gather(*(ask(server.port, "POST", COMPLETIONS, body(0, 1)) for _ in range(10)))
        assert {answer.status for answer in answers} == {200}
        assert time.monotonic() - began < LIVELY_S


async def test_any_worker_shows_and_logs_the_requests_of_all(workers: Server) -> None:
    answers = await asyncio.gather(*(ask(workers.port, "POST", COMPLETIONS, body(seed, 4)) for seed in range(60)))
    assert {answer.status for answer in answers} == {200}
    await workers.eventually(lambda: shows(workers, 60, "headrace_requests_total"))
    for _ in range(3):  # not more: a worker that never asks one of the others must not be passed over
        pages = [await asyncio.to_thread(Page, workers) for _ in range(12)]
        if all(page.is_whole for page in pages):
            break
    assert all(page.is_whole for page in pages)
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
    assert load["server_load"] <= 60
    return int(load["server_load"])


async def test_a_killed_worker_costs_its_own_streams_alone_and_comes_back(workers: Server, random_checkpoint: Checkpoint) -> None:
    running = [asyncio.create_task(try_stream(workers, seed)) for seed in range(60)]
    await workers.eventually(lambda: workers.load().num_running == 60)
    await workers.eventually(lambda: server_load(workers) == 60)
    lost = int((await asyncio.to_thread(whole_page, workers)).total("headrace_gateway_requests_open", worker="1"))
    pid = workers.pids()["gateway-1"]
    os.kill(pid, signal.SIGKILL)
    # Until its last thread has ended, the kernel may still hand connections to it.
    await workers.eventually(lambda: "gateway-1 was killed by SIGKILL" in workers.log)
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


async def test_nothing_is_left_when_the_supervisor_is_killed(random_folder: Path) -> None:
    with serving_fake(random_folder, fake={**CROWD, "step_seconds": 0.05}, engine=CROWD_ENGINE, gateway={"workers": 2}) as server:
        running = [asyncio.create_task(try_stream(server, seed)) for seed in range(8)]
        await server.eventually(lambda: server.load().num_running == 8)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2 + 1 + 2 * 2, "workers, their text workers, and the engine"
        server.process.kill()
        await server.eventually(lambda: not any(is_alive(child.pid) for child in children))
        ended = await asyncio.gather(*running)
        assert not [answer for answer in ended if isinstance(answer, Answer) and answer.is_done]


async def test_every_worker_finishes_its_streams_when_the_deployment_stops(workers: Server, random_checkpoint: Checkpoint) -> None:
    running = [asyncio.create_task(try_stream(workers, seed)) for seed in range(30)]
    await workers.eventually(lambda: workers.load().num_running == 30)
    open_by_worker = (await asyncio.to_thread(whole_page, workers)).by_worker("headrace_gateway_requests_open")
    assert min(open_by_worker) > 0, open_by_worker
    await asyncio.to_thread(workers.stop)
    ended = await asyncio.gather(*running)
    assert [answer.text[0] for answer in ended if isinstance(answer, Answer)] == [expected_text(random_checkpoint, s) for s in range(30)]
    drained = re.findall(r'"process":"(gateway-\d)"[^\n]*draining (\d+) request', workers.log)
    assert sorted(drained) == [(f"gateway-{index}", str(int(count))) for index, count in enumerate(open_by_worker)]


@pytest.mark.slow
async def test_a_reload_reaches_every_worker(random_folder: Path) -> None:
    limits = {"num_kv_blocks": 64, "max_num_seqs": 2, "num_threads": 1}
    before = {"models": [{"engine": {"model": str(random_folder), **limits}}], "gateway": {"workers": WORKERS, "api_keys": [{"key": KEY}]}}
    after = {**before, "gateway": {"workers": WORKERS, "api_keys": [{"key": KEY}, {"key": "a-key-that-came-later"}]}}

    async def statuses(key: str) -> set[int]:
        """Of many connections, so that each worker has some."""
        return {answer.status for answer in await asyncio.gather(*(ask(server.port, "GET", "/v1/models", key=key) for _ in range(40)))}

    with serving(before) as server:
        assert (await statuses(KEY), await statuses("a-key-that-came-later")) == ({200}, {401})
        (server.folder / "config.yaml").write_text(json.dumps(after))
        server.process.send_signal(signal.SIGHUP)
        began = time.monotonic()
        while await statuses("a-key-that-came-later") != {200}:
            assert time.monotonic() - began < LIVELY_S
            await asyncio.sleep(0.1)
        assert await statuses(KEY) == {200}
