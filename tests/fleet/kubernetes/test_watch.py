"""Tests that the pods of a Service are followed whatever an API server does, and that nothing is lost while it does nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kube_kit import TOKEN, KubeServer, endpoint, kube_server, slice_of
from patience import eventually
from virtual_time import VirtualTimeLoop

from headrace.fleet.kubernetes.api import MAX_EVENT_BYTES, WATCH_S
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES, engines_of
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.kubernetes.watch import LAST_PAUSE_S, EndpointWatch

pytestmark = pytest.mark.loop

T = TypeVar("T")

SLICE = slice_of(endpoint("e-0", "10.0.0.1"))


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[KubeServer]:
    async with kube_server(tmp_path) as server:
        await server.put("endpointslices", "engines-a", SLICE)
        yield server


@asynccontextmanager
async def watching(kube: KubeServer) -> AsyncIterator[EndpointWatch]:
    watch = EndpointWatch(kube.api, KubernetesService(service="engines"), lambda: None)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def names(watch: EndpointWatch) -> list[str]:
    return [engine.name for engine in watch.engines]


async def has(watch: EndpointWatch, *wanted: str) -> None:
    await eventually(lambda: names(watch) == [*wanted])


async def test_pods_that_come_and_go_are_followed_by_one_list_and_one_watch(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.put("endpointslices", "engines-b", slice_of(endpoint("e-1", "10.0.0.2")))
        await has(watch, "e-0", "e-1")
        await kube.put("endpointslices", "engines-a", slice_of())
        await has(watch, "e-1")
        await kube.put("endpointslices", "engines-a", SLICE)
        await kube.remove("endpointslices", "engines-b")
        await has(watch, "e-0")
        await kube.put("endpointslices", "other", slice_of(endpoint("x", "10.0.0.3"), service="other"))
        await asyncio.sleep(1)
        assert names(watch) == ["e-0"]
        assert (kube.calls("list"), kube.calls("watch")) == (1, 1)


async def test_a_watch_that_ends_begins_again_where_it_ended_also_when_only_a_bookmark_came(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.bookmark()
        await asyncio.sleep(1)
        kube.forget()
        await asyncio.sleep(WATCH_S)
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-1", "10.0.0.2")))
        await has(watch, "e-1")
        assert (kube.calls("list"), kube.calls("watch")) == (1, 2)


async def test_changes_that_the_server_has_forgotten_are_found_by_another_list(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.stop()
        kube.objects["endpointslices", "engines-a"]["endpoints"] = [endpoint("e-5", "10.0.0.5")]
        kube.version += 50
        kube.forget()
        await kube.start()
        await has(watch, "e-5")


async def test_a_version_that_is_gone_is_said_by_the_watch_itself_and_lists_again(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        kube.objects.pop(("endpointslices", "engines-a"))
        kube.version += 50
        kube.forget()
        await kube.put("endpointslices", "engines-b", slice_of(endpoint("e-7", "10.0.0.7")))
        kube.forget()
        await asyncio.sleep(WATCH_S + 1)
        await has(watch, "e-7")
        assert kube.calls("list") == 2


async def test_while_the_server_is_lost_the_engines_stay_and_it_is_asked_ever_more_rarely(
    kube: KubeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.fleet")
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.stop()
        await asyncio.sleep(3600)
        assert names(watch) == ["e-0"]
        assert "gave no answer" in watch.failure
        assert caplog.text.count("It stays at 1 engine") == 2, "that the watch broke, and once that no connection is taken"
        before = len(kube.asked)
        await kube.start()
        await asyncio.sleep(LAST_PAUSE_S)
        assert watch.failure == ""
        assert len(kube.asked) - before == 2, "a list and a watch"
        assert "followed again" in caplog.text


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_a_pause(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        for _ in range(1000):
            await kube.end_watches()
            await asyncio.sleep(0.1)
        assert kube.calls("watch") < 20
        await asyncio.sleep(LAST_PAUSE_S)
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-1", "10.0.0.2")))
        await has(watch, "e-1")


async def test_a_token_that_is_rotated_is_read_anew(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        kube.rotate_token()
        await asyncio.sleep(WATCH_S + 1)
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-1", "10.0.0.2")))
        await has(watch, "e-1")
        assert watch.failure == ""


REFUSALS = {
    ("list", "endpointslices"): 'Its Role needs apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], verbs: ["list"].',
    ("watch", "endpointslices"): 'Its Role needs apiGroups: ["discovery.k8s.io"], resources: ["endpointslices"], verbs: ["watch"].',
}


@pytest.mark.parametrize("forbidden", REFUSALS)
async def test_a_rule_that_a_role_lacks_is_named(kube: KubeServer, forbidden: tuple[str, str]) -> None:
    kube.forbidden.add(forbidden)
    async with watching(kube) as watch:
        await eventually(lambda: REFUSALS[forbidden].rstrip(".") in watch.failure)
        kube.forbidden.clear()
        await has(watch, "e-0")
        await eventually(lambda: watch.failure == "")


async def test_a_token_that_is_refused_or_missing_is_said(kube: KubeServer) -> None:
    (kube.account / "token").write_text("another")
    async with watching(kube) as watch:
        await eventually(lambda: "401, Unauthorized. The service account's token is not valid there" in watch.failure)
        (kube.account / "token").unlink()
        await eventually(lambda: "the pod needs a service account's token" in watch.failure)
        (kube.account / "token").write_text(TOKEN)
        await has(watch, "e-0")


async def test_a_service_that_is_not_there_takes_no_engine_away(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.remove("endpointslices", "engines-a")
        await eventually(lambda: "it is missing, or has no selector" in watch.failure)
        assert names(watch) == ["e-0"]
        await kube.put("endpointslices", "engines-a", slice_of())
        await has(watch)
        assert watch.failure == ""


async def test_a_port_of_another_name_is_said(kube: KubeServer) -> None:
    await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-0", "10.0.0.1"), port_name="grpc"))
    async with watching(kube) as watch:
        await eventually(lambda: watch.failure == "it has no port called engine")


async def test_pods_beyond_the_limit_are_left_out_and_said(kube: KubeServer) -> None:
    pods = [endpoint(f"e-{number:04}", f"10.0.{number // 250}.{number % 250 + 1}") for number in range(MAX_ENGINES + 3)]
    await kube.put("endpointslices", "engines-a", slice_of(*pods))
    async with watching(kube) as watch:
        await eventually(lambda: len(watch.engines) == MAX_ENGINES)
        assert f"it has {MAX_ENGINES + 3} pods" in watch.failure
        await kube.put("endpointslices", "engines-a", slice_of(*pods[3:]))
        await eventually(lambda: watch.failure == "" and names(watch)[0] == "e-0003")


async def test_an_event_that_is_too_long_changes_nothing(kube: KubeServer) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        long = {**slice_of(endpoint("e-1", "10.0.0.2")), "x": "y" * 2 * MAX_EVENT_BYTES}
        await kube.put("endpointslices", "engines-a", long)
        await eventually(lambda: "gave no answer" in watch.failure)
        assert names(watch) in (["e-0"], ["e-1"]), "a list may be longer than an event"


async def test_an_answer_that_is_none_of_kubernetes_changes_nothing(kube: KubeServer, caplog: pytest.LogCaptureFixture) -> None:
    async with watching(kube) as watch:
        await has(watch, "e-0")
        await kube.put("endpointslices", "engines-a", {**SLICE, "endpoints": 5})
        await eventually(lambda: watch.failure != "")
        assert names(watch) == ["e-0"]


PODS = st.lists(
    st.builds(endpoint, st.sampled_from(["e-0", "e-1", "e-2"]), st.sampled_from(["10.0.0.1", "10.0.0.2"]), terminating=st.booleans()),
    max_size=3,
)


class WatchMachine(RuleBasedStateMachine):
    """Whatever the cluster and its API server do, the watch has in the end what the slices say."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.stack = AsyncExitStack()
        self.is_down = False

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    @initialize()
    def start(self) -> None:
        folder = Path(self.stack.enter_context(TemporaryDirectory()))
        self.run(self._start(folder))

    async def _start(self, folder: Path) -> None:
        self.kube = await self.stack.enter_async_context(kube_server(folder))
        await self.kube.put("endpointslices", "engines-a", SLICE)
        self.watch = await self.stack.enter_async_context(watching(self.kube))

    @rule(name=st.sampled_from("ab"), pods=PODS)
    def put(self, name: str, pods: list[dict[str, Any]]) -> None:
        self.run(self.kube.put("endpointslices", f"engines-{name}", slice_of(*pods)))

    @precondition(lambda self: ("endpointslices", "engines-b") in self.kube.objects)
    @rule()
    def remove(self) -> None:
        self.run(self.kube.remove("endpointslices", "engines-b"))

    @rule()
    def bookmark(self) -> None:
        self.run(self.kube.bookmark())

    @rule()
    def forget(self) -> None:
        self.kube.forget()

    @rule()
    def reset(self) -> None:
        self.kube.break_watches()

    @rule()
    def end(self) -> None:
        self.run(self.kube.end_watches())

    @rule()
    def rotate(self) -> None:
        self.kube.rotate_token()

    @precondition(lambda self: not self.is_down)
    @rule()
    def go_down(self) -> None:
        self.is_down = True
        self.run(self.kube.stop())

    @precondition(lambda self: self.is_down)
    @rule()
    def come_up(self) -> None:
        self.is_down = False
        self.run(self.kube.start())

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def teardown(self) -> None:
        if hasattr(self, "watch"):
            self.run(self._check())
        self.loop.close()

    async def _check(self) -> None:
        if self.is_down:
            await self.kube.start()
        await asyncio.sleep(2 * LAST_PAUSE_S)
        slices = self.kube.objects.values()
        assert self.watch.engines == engines_of(slices, "engine", self.watch.engines)
        assert self.watch.failure == ""
        await self.stack.aclose()


TestWatchMachine = WatchMachine.TestCase
TestWatchMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
