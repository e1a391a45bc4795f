"""Tests many adapters over few places with clients that leave, an engine that is gone, and an adapter that is loaded again, over the fake
runner, which checks that no KV of other weights is read. The same with real weights and processes is `bench/storms/adapters.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.adapters import AdapterSource
from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.lab.fake_adapters import save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine

pytestmark = pytest.mark.socket

OPTIONS = FakeOptions(block_size=4, num_blocks=65, max_model_len=128)
NUM_BYTES, NUM_ADAPTERS, NUM_PLACES, NUM_REQUESTS = 1000, 24, 4, 300
MAX_TOKENS = 12
MAX_TURNS = 10**6
PROMPTS = tuple(tuple(question.encode()) for question in ("What is it?", "What is it, and why?", "Count to ten.", "Mill?"))


class TurnedEngine:
    """An engine turned by hand, and the tokens of each of its requests so far."""

    def __init__(self, sources: list[AdapterSource]) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.open: set[str] = set()
        self.refused: dict[str, Exception] = {}
        config = EngineConfig(model="fake", enable_lora=True, lora_modules=tuple(sources), max_loras=NUM_PLACES)
        self.engine = fake_engine(self._take, OPTIONS, replace(config, max_num_seqs=2 * NUM_PLACES, max_num_batched_tokens=64))

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            name = str(update.request_id)
            if isinstance(update, Rejected):
                self.refused[name] = update.error
                self.open.discard(name)
                continue
            assert update.error is None, update.error
            self.token_ids[name] += update.token_ids
            if update.finish is not None:
                self.open.discard(name)

    def submit(self, request: EngineRequest) -> None:
        self.token_ids[str(request.request_id)] = list(request.output_ids)
        self.open.add(str(request.request_id))
        self.engine.submit(request)

    def turn(self) -> None:
        if not self.engine.turn():
            self.engine.idle()  # an adapter is read on another thread
        assert self.engine._adapters is not None
        self.engine._adapters.check()

    def check_idle(self) -> None:
        self.engine.scheduler.check()
        load = self.engine.snapshot()
        assert (load.num_running, load.num_waiting, load.running_adapters, load.waiting_adapters) == (0, 0, (), ())
        assert load.kv_blocks_used == len(self.engine.info.kv_groups), "one pad block of each group is always in use"

    def close(self) -> None:
        self.engine.stop()
        self.engine.run()


class Churn:
    """requests: all that were sent, by name. ended_early: those that their client left"""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw = folder, random.Random(seed)
        self._sources = [self._save(f"adapter-{number}", number) for number in range(NUM_ADAPTERS)]
        self.requests: dict[str, EngineRequest] = {}
        self.ended_early: set[str] = set()
        self.token_ids: dict[str, list[int]] = {}
        self.refused: dict[str, Exception] = {}
        self.num_reloads = self.peak_bytes = 0
        self._engine = TurnedEngine(self._sources)

    def _save(self, name: str, seed: int) -> AdapterSource:
        return AdapterSource(name=name, path=str(save_fake_adapter(self._folder / name, bytes([seed]) * NUM_BYTES)))

    def run(self) -> None:
        """Raises AssertionError where an engine's books are wrong."""
        for _ in range(MAX_TURNS):
            if len(self.requests) >= NUM_REQUESTS and not self._engine.open:
                break
            while len(self.requests) < NUM_REQUESTS and len(self._engine.open) < 3 * NUM_PLACES and self._draw.random() < 0.7:
                self._ask(None if self._draw.random() < 0.1 else self._draw.choice(self._sources).name)
            if len(self.requests) >= NUM_REQUESTS // 3 and self.num_reloads == 0:
                self._reload()
            if len(self.requests) >= NUM_REQUESTS // 2 and self.num_reloads == 1:
                self._reload()
                self._lose_engine()
            if self._engine.open and self._draw.random() < 0.05:
                self._leave(self._draw.choice(sorted(self._engine.open)))
            self._engine.turn()
        else:
            raise AssertionError(f"{len(self._engine.open)} requests did not end")
        self._engine.check_idle()
        self._end(self._engine)

    def _ask(self, adapter: str | None) -> str:
        name = f"r{len(self.requests)}"
        request = EngineRequest(
            request_id=RequestId(name),
            prompt_ids=self._draw.choice(PROMPTS),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True),
            tenant=self._draw.choice("abc"),
            adapter=adapter,
            adapter_digest="" if adapter is None else self._engine.engine.info.adapters[adapter],
        )
        self.requests[name] = request
        self._engine.submit(request)
        return name

    def _leave(self, name: str) -> None:
        self._engine.engine.cancel(RequestId(name))
        self.ended_early.add(name)

    def _reload(self) -> None:
        """The first adapter under its name with other weights, while a request runs with the old ones."""
        name = self._ask("adapter-0")
        while name in self._engine.open and not self._engine.token_ids[name]:
            self._engine.turn()
        self.num_reloads += 1
        self._save("adapter-0", NUM_ADAPTERS + self.num_reloads)
        before = self._engine.engine.info.adapters["adapter-0"]
        self._engine.engine.set_adapters(self._sources)
        assert self._engine.engine.info.adapters["adapter-0"] != before
        self._ask("adapter-0")

    def _lose_engine(self) -> None:
        lost, self._engine = self._engine, TurnedEngine(self._sources)
        self._end(lost)
        for name in sorted(lost.open - self.ended_early):
            self._engine.submit(self.requests[name].resumed(0, lost.token_ids[name], ""))

    def _end(self, engine: TurnedEngine) -> None:
        self.token_ids |= engine.token_ids
        self.refused |= engine.refused
        self.peak_bytes = max(self.peak_bytes, engine.engine.snapshot().adapter_pool_highest_bytes or 0)
        engine.close()


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_that_of_its_adapters_weights(tmp_path: Path, seed: int) -> None:
    churn = Churn(tmp_path, seed)
    churn.run()
    for name, request in churn.requests.items():
        got, whole = churn.token_ids[name], fake_answer(request, 0, MAX_TOKENS, OPTIONS)
        is_whole = name not in churn.ended_early and name not in churn.refused
        assert got == (whole if is_whole else whole[: len(got)]), name
    assert churn.peak_bytes == NUM_PLACES * NUM_BYTES, "no more adapters on the host than places"
    assert len(churn.ended_early) > 10
    assert churn.num_reloads == 2
    replaced = {request.adapter_digest for request in churn.requests.values() if request.adapter == "adapter-0"}
    assert len(replaced) == 3
    assert 1 <= len(churn.refused) < 20
    for name, error in churn.refused.items():
        assert isinstance(error, Unavailable)
        assert churn.requests[name].adapter == "adapter-0", error
