"""Tests that of several pods one at most holds the Lease at any time, and that one does again when its holder is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kube_kit import NAMESPACE, KubeServer, kube_server
from patience import eventually
from virtual_time import VirtualTimeLoop

from headrace.fleet.kubernetes.api import CALL_S, ApiResource, KubernetesApi, KubernetesFailed, KubernetesObject
from headrace.fleet.kubernetes.lease import HELD_S, LEASE_S, RENEW_S, LeaderLease

pytestmark = pytest.mark.loop

T = TypeVar("T")


class Pod:
    """Takes part until it ends, or stands still."""

    def __init__(self, kube: KubeServer, identity: str, link: KubernetesApi | None = None) -> None:
        self.lease = LeaderLease(link or kube.api, NAMESPACE, "engines-autoscaler", identity)
        self.task = asyncio.create_task(self.lease.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[KubeServer]:
    async with kube_server(tmp_path) as server:
        yield server


async def test_one_of_two_pods_holds_it_and_keeps_it(kube: KubeServer) -> None:
    first = Pod(kube, "a")
    await eventually(lambda: first.lease.is_held)
    second = Pod(kube, "b")
    for _ in range(200):
        await asyncio.sleep(1)
        assert (first.lease.is_held, second.lease.is_held) == (True, False)
    assert kube.objects["leases", "engines-autoscaler"]["spec"]["leaseTransitions"] == 1
    await first.end()
    await second.end()


async def test_a_holder_that_ends_gives_it_to_the_next_one_soon(kube: KubeServer) -> None:
    first = Pod(kube, "a")
    await eventually(lambda: first.lease.is_held)
    second = Pod(kube, "b")
    await asyncio.sleep(10)
    await first.end()
    assert not first.lease.is_held
    await asyncio.sleep(2 * RENEW_S)
    assert second.lease.is_held
    await second.end()


@pytest.mark.parametrize("spec", ["none", [1], {"leaseDurationSeconds": "long", "holderIdentity": "b"}])
async def test_an_answer_that_is_no_lease_is_named_and_asked_for_again(kube: KubeServer, spec: object) -> None:
    await kube.put("leases", "engines-autoscaler", {"spec": spec})
    pod = Pod(kube, "a")
    await eventually(lambda: "it is no Lease" in pod.lease.failure)
    await kube.put("leases", "engines-autoscaler", {"spec": {}})
    await eventually(lambda: pod.lease.is_held)
    assert not pod.lease.failure
    await pod.end()


async def test_a_holder_that_loses_the_server_counts_it_as_lost_before_another_one_may_have_it(kube: KubeServer) -> None:
    first = Pod(kube, "a")
    await eventually(lambda: first.lease.is_held)
    await kube.stop()
    await asyncio.sleep(HELD_S)
    assert not first.lease.is_held
    await kube.start()
    await asyncio.sleep(RENEW_S)
    assert first.lease.is_held
    await first.end()


async def test_two_that_ask_at_once_are_not_both_served(kube: KubeServer) -> None:
    pods = [Pod(kube, name) for name in "abcde"]
    await eventually(lambda: any(pod.lease.is_held for pod in pods))
    assert sum(pod.lease.is_held for pod in pods) == 1
    await asyncio.gather(*(pod.end() for pod in pods))


class Link(KubernetesApi):
    """A pod's way to the server. is_late: calls wait; is_cut: none comes through"""

    is_late = is_cut = False

    async def call(
        self, verb: str, resource: ApiResource, namespace: str, name: str = "", body: object = None, **query: str
    ) -> KubernetesObject:
        await eventually(lambda: not self.is_late)
        if self.is_cut:
            raise KubernetesFailed("cut off")
        return await super().call(verb, resource, namespace, name, body, **query)


class FirstLink(Link):
    pass


class SecondLink(Link):
    pass


async def test_a_pod_that_read_late_counts_from_its_answer(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Pod(kube, "a", FirstLink(kube.api.url, kube.account))
    await eventually(lambda: first.lease.is_held)
    monkeypatch.setattr(SecondLink, "is_late", True)
    second = Pod(kube, "b", SecondLink(kube.api.url, kube.account))
    await asyncio.sleep(LEASE_S - RENEW_S)
    renewed = kube.calls("update")
    await eventually(lambda: kube.calls("update") > renewed)
    monkeypatch.setattr(FirstLink, "is_cut", True)
    monkeypatch.setattr(SecondLink, "is_late", False)
    for _ in range(3000):
        await asyncio.sleep(0.01)
        assert first.lease.is_held + second.lease.is_held <= 1
    assert second.lease.is_held
    await asyncio.gather(first.end(), second.end())


class LeaseMachine(RuleBasedStateMachine):
    """Pods come, end, are killed and cut off from the server; it goes down and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.stack = AsyncExitStack()
        self.pods: list[Pod] = []
        self.num_pods = 0
        self.is_down = False

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(main)

    @initialize()
    def start(self) -> None:
        folder = Path(self.stack.enter_context(TemporaryDirectory()))
        self.kube: KubeServer = self.run(self.stack.enter_async_context(kube_server(folder)))

    @precondition(lambda self: len(self.pods) < 3)
    @rule()
    def come(self) -> None:
        self.num_pods += 1
        self.run(self._come())

    async def _come(self) -> None:
        self.pods.append(Pod(self.kube, f"pod-{self.num_pods}"))

    @precondition(lambda self: self.pods)
    @rule()
    def end(self) -> None:
        self.run(self.pods.pop(0).end())

    @precondition(lambda self: self.pods)
    @rule()
    def die(self) -> None:
        """Killed: it gives nothing up."""
        self.pods[0].lease._held_until = -1.0
        self.run(self.pods.pop(0).end())

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

    @rule(seconds=st.sampled_from([0.0, 2.0, 4.5, 7.0]))
    def be_slow(self, seconds: float) -> None:
        """7.0: calls are carried out, and their answers come too late."""
        self.kube.slow_s = seconds

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 5.0, 9.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @invariant()
    def at_most_one_holds_it(self) -> None:
        assert sum(pod.lease.is_held for pod in self.pods) <= 1

    def teardown(self) -> None:
        if hasattr(self, "kube"):
            self.run(self._check())
        self.loop.close()

    async def _check(self) -> None:
        if self.is_down:
            await self.kube.start()
        self.kube.slow_s = 0.0
        await asyncio.sleep(LEASE_S + CALL_S + 3 * RENEW_S)
        assert sum(pod.lease.is_held for pod in self.pods) == min(1, len(self.pods))
        for pod in self.pods:
            await pod.end()
        await self.stack.aclose()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
