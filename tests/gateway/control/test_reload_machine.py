"""Tests random reloads under running requests: every request that a configuration admitted ends whole, whatever the later ones
take away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx2
import pytest
import text_kit
from gateway_kit import SAID, FakeReplica, TestBench, chat_body, events_of, gateway_config, open_bench
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from virtual_time import VirtualTimeLoop

from headrace.core.errors import ConfigError
from headrace.text.folder import TextModel, load_text

pytestmark = pytest.mark.loop

T = TypeVar("T")

NAMES = ("fox", "owl", "elk")
KEYS = ("first-key-1", "other-key-2")
FAILOVER = {"failover_s": 30}
NUMERICS = {"weights": "ab"}
MAX_ENDED = 2
"""Engines that end: a call moves twice without a new token in between, and no third time (`upstream.own.attempts`)."""


models = st.dictionaries(st.sampled_from(NAMES), st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=1)
"""Model -> numbers of its replicas."""


class ReloadMachine(RuleBasedStateMachine):
    """One event loop on virtual time, which runs only inside the rules. Replicas say nothing unless a rule lets them."""

    text: TextModel

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.stack = AsyncExitStack()
        self.running: list[asyncio.Task[httpx2.Response]] = []
        self.made: list[FakeReplica] = []
        self.num_ended = 0
        self.served: set[str] = set()
        self.keys: tuple[str, ...] = ()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    # -- rules -------------------------------------------------------------------------------------------------------------------

    @initialize(served=models)
    def start(self, served: dict[str, set[int]]) -> None:
        config = described(served, ())
        self.bench: TestBench = self.run(self.stack.enter_async_context(open_bench(self.text, **config)))
        self.applied(served, ())

    @rule(served=models, keys=st.sets(st.sampled_from(KEYS)))
    def reload(self, served: dict[str, set[int]], keys: set[str]) -> None:
        config = gateway_config(**described(served, tuple(sorted(keys))))
        self.run(self.bench.reloader.reload(lambda: config))
        self.applied(served, tuple(sorted(keys)))

    @rule(served=models)
    def refused_reload(self, served: dict[str, set[int]]) -> None:
        config = gateway_config(**described(served, KEYS), salt_key="ab" * 16)
        with pytest.raises(ConfigError, match="salt_key"):
            self.run(self.bench.reloader.reload(lambda: config))

    @rule(number=st.integers(0, 2), turns=st.integers(0, 12))
    def ask(self, number: int, turns: int) -> None:
        """turns: of the event loop until the next rule: a request may be anywhere between its first byte and its replica"""
        name = sorted(self.served)[number % len(self.served)]
        headers = {"authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        asked = self.bench.client.post("/v1/chat/completions", json=chat_body(model=name, stream=True), headers=headers)
        self.running.append(self.loop.create_task(asked))
        self.run(self.turns(turns))

    @rule(number=st.integers(0, 30), turns=st.integers(1, 30))
    def speak(self, number: int, turns: int) -> None:
        """One replica says a few tokens."""
        replica = self.made[number % len(self.made)]
        replica.go.set()
        self.run(self.turns(turns))
        replica.go.clear()

    @rule(number=st.integers(0, 30))
    def retired_engine_ends(self, number: int) -> None:
        """Its time to drain is over: its requests go on at another replica. Nothing where none is retired, which is a matter of time."""
        if (retired := self.retired()) and self.num_ended < MAX_ENDED:
            self.num_ended += 1
            retired[number % len(retired)].die()
        self.run(self.turns(3))

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "bench"):
            self.bench.reloader.check()
            assert {model.name for model in self.bench.gateway.service.models.models} == self.served

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.run(self.finish())
        self.run(self.stack.aclose())
        self.loop.close()

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def applied(self, served: dict[str, set[int]], keys: tuple[str, ...]) -> None:
        self.served, self.keys = set(served), keys
        for replica in self.bench.replicas.values():
            if not any(known is replica for known in self.made):
                replica.go.clear()
                assert replica.info is not None
                replica.info = replace(replica.info, model=replace(replica.info.model, numerics=NUMERICS))
                self.made.append(replica)

    def retired(self) -> list[FakeReplica]:
        """Retired replicas of models that still have others: what they compute can move there."""
        pools = [model.pool for model in self.bench.reloader._models.models.values()] if hasattr(self, "bench") else []
        retired = [replica.connection for pool in pools if pool is not None for replica in pool.retired]
        return [replica for replica in retired if isinstance(replica, FakeReplica) and replica.info is not None]

    async def finish(self) -> None:
        """Let everything end: each answer is whole, and nothing that left is still connected."""
        for replica in self.made:
            replica.go.set()
        async with asyncio.timeout(60):
            for response in await asyncio.gather(*self.running):
                assert response.status_code == 200, response.text
                assert response.text.endswith("data: [DONE]\n\n"), response.text
                deltas = [choice["delta"] for event in events_of(response.text) for choice in event["choices"]]
                assert "".join(delta.get("content", "") for delta in deltas) == SAID
            while any(status.reason == "retired" for seen in self.bench.reloader.status().values() for status in seen.replicas.values()):
                await asyncio.sleep(0.002)
        wanted = {replica.name for model in self.bench.reloader.config.models for replica in model.replicas}
        assert {replica.name for replica in self.made if not replica.is_closed} == wanted


def described(served: dict[str, set[int]], keys: tuple[str, ...]) -> dict[str, Any]:
    """The parts of a configuration. A replica's name is its own, whichever reload brings it."""
    listed = [
        {
            "name": name,
            "folder": f"/{name}",
            "replicas": [{"name": f"{name}-{number}", "address": f"unix:/nowhere/{name}-{number}"} for number in sorted(numbers)],
        }
        for name, numbers in sorted(served.items())
    ]
    return {"models": listed, "timeouts": FAILOVER, "api_keys": [{"key": key} for key in keys]}


@pytest.fixture(scope="module", autouse=True)
def text_of_machine() -> Any:
    with TemporaryDirectory() as folder:
        ReloadMachine.text = load_text(text_kit.save_byte_level(Path(folder) / "model"))
        ReloadMachine.text.template.compile()
        yield


TestReloadMachine = ReloadMachine.TestCase
TestReloadMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
