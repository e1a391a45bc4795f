"""Tests a deployment whose engines run on the nodes of a cluster: where they are listed, what their ends lead to, and what is asked for.

Agents are the product's own, over scripted engines. Ray itself: test_cluster.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from scripted_nodes import ScriptedCluster, site_on_nodes
from scripted_site import Script, ScriptedSite

from headrace.bundled import bundled_adapter, bundled_path
from headrace.core.errors import ConfigError
from headrace.fleet.config import ModelSpec, ReplicaRange
from headrace.fleet.keeper import FIRST_PAUSE_S
from headrace.fleet.ray.host import LAST_REQUEST_S, PLACE_NOTICE_S
from headrace.fleet.ray.options import RayOptions

pytestmark = pytest.mark.loop

SCALED = ModelSpec(name="tiny", folder=Path("/m"), autoscale=ReplicaRange(min=1, max=2))


def listed(site: ScriptedSite, model: str = "tiny") -> dict[str, dict[str, Any]]:
    """Replicas in the file that the gateway has read."""
    [found] = [each for each in site.process("gateway").config["models"] if each["name"] == model]
    return {replica["name"]: replica for replica in found["replicas"]}


def hosts(site: ScriptedSite) -> dict[str, str]:
    return {name: replica["address"].rpartition(":")[0] for name, replica in listed(site).items()}


async def test_a_replica_is_listed_with_its_nodes_address_once_it_serves() -> None:
    script = Script(loading={"tiny-1"})
    async with site_on_nodes({"10.0.0.1": 1, "10.0.0.2": 1}, script, models={"tiny": 2}) as (site, cluster):
        await eventually(lambda: site.is_launched("tiny-1"))
        assert hosts(site) == {"tiny-0": cluster.of("tiny-0").node}
        script.loading.clear()
        await site.all_serving()
        assert set(hosts(site).values()) == {"10.0.0.1", "10.0.0.2"}
        replicas = listed(site)
        assert len({replica["token"] for replica in replicas.values()}) == 2, "of each start its own"
        for name, replica in replicas.items():
            assert replica["token"] == site.process(name).config["token"]


async def test_requests_wait_for_a_replica_that_is_not_listed_yet() -> None:
    script = Script(loading={"tiny-1"})
    async with site_on_nodes({"10.0.0.1": 2}, script, specs=(SCALED,)) as (site, _):
        await site.all_serving()
        assert (await site.do("drain", replica="tiny-0", within_s=5, allow_outage=True))[-1] == {"event": "done"}
        await eventually(lambda: site.is_launched("tiny-1"))
        await eventually(lambda: not listed(site))
        [entry] = site.process("gateway").config["models"]
        assert (entry["starts_on_demand"], entry["num_wanted"], "unavailable" in entry) == (True, 1, False)
        script.loading.clear()
        await eventually(lambda: "tiny-1" in listed(site))
        [entry] = site.process("gateway").config["models"]
        assert ("starts_on_demand" in entry, entry["num_wanted"]) == (False, 1)


async def test_requests_do_not_wait_for_a_replica_that_cannot_start() -> None:
    script = Script(failing={"tiny-1": "model.safetensors is truncated"})
    async with site_on_nodes({"10.0.0.1": 2}, script, specs=(SCALED,)) as (site, _):
        await site.all_serving()
        await site.do("drain", replica="tiny-0", within_s=5, allow_outage=True)
        await eventually(lambda: "refused its" in site.process("gateway").config["models"][0].get("unavailable", ""))
        assert "starts_on_demand" not in site.process("gateway").config["models"][0]


async def test_an_engines_file_has_what_its_node_decides() -> None:
    spec = ModelSpec(name="tiny", folder=Path("/srv/model"), replicas=1, engine={"max_num_seqs": 4})
    async with site_on_nodes({"10.0.0.1": 2}, options=RayOptions(num_cpus=3), specs=(spec,)) as (site, cluster):
        process = site.process("tiny-0")
        assert process.config["address"] == "10.0.0.1:0"
        assert process.config["num_neighbours"] == 1, "the node has room for another one"
        assert process.config["engine"]["model"] == "/srv/model"
        assert 1 <= process.config["engine"]["num_threads"] <= 3
        assert not {"cpus", "gpu", "rendezvous"} & set(process.config)
        assert stat.S_IMODE(process.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(process.path.parent.stat().st_mode) == 0o700
        assert process.path.parent != site.run_dir
        assert process.config["token"] not in repr(cluster.of("tiny-0").orders)
    assert not process.path.parent.exists()


async def test_the_certificate_of_an_engine_is_for_its_node_and_of_the_gateways_authority() -> None:
    async with site_on_nodes({"10.0.0.1": 1}) as (site, _):
        of_gateway, of_engine = Path(listed(site)["tiny-0"]["tls_dir"]), Path(site.process("tiny-0").config["tls_dir"])
        assert (of_gateway / "ca.crt").read_text() == (of_engine / "ca.crt").read_text()
        assert [path.name for path in site.run_dir.rglob("*.key")] == ["tls.key"], "neither the authority's nor an engine's"
        _shake_hands(of_gateway, of_engine, "10.0.0.1")
        with pytest.raises(ssl.SSLCertVerificationError, match=r"10\.0\.0\.2"):
            _shake_hands(of_gateway, of_engine, "10.0.0.2")


def _shake_hands(of_gateway: Path, of_engine: Path, host: str) -> None:
    near, far = ssl.create_default_context(cafile=of_gateway / "ca.crt"), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    near.load_cert_chain(of_gateway / "tls.crt", of_gateway / "tls.key")
    far.load_cert_chain(of_engine / "tls.crt", of_engine / "tls.key")
    far.load_verify_locations(of_engine / "ca.crt")
    far.verify_mode = ssl.CERT_REQUIRED
    to_far, to_near = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = near.wrap_bio(to_near, to_far, server_hostname=host), far.wrap_bio(to_far, to_near, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


async def test_replicas_of_a_lost_node_are_started_on_another_one(caplog: pytest.LogCaptureFixture) -> None:
    async with site_on_nodes({"10.0.0.1": 2, "10.0.0.2": 1}, models={"tiny": 2}) as (site, cluster):
        cluster.room["10.0.0.3"] = 1
        before = listed(site)
        lost = cluster.of("tiny-0")
        cluster.lose_node(lost.node)
        await eventually(lambda: cluster.of("tiny-0") is not lost and hosts(site)["tiny-0"] == cluster.of("tiny-0").node)
        assert cluster.of("tiny-0").node != lost.node
        assert listed(site)["tiny-0"]["token"] != before["tiny-0"]["token"]
        assert f"tiny-0 ended: the node {lost.node} has died; starting it again in {FIRST_PAUSE_S} s" in caplog.text
        await site.all_serving()


async def test_a_replica_that_dies_alone_is_started_again_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with site_on_nodes({"10.0.0.1": 2}) as (site, cluster):
        first = cluster.of("tiny-0")
        site.process("tiny-0").kill()
        await eventually(lambda: len(site.pids("tiny-0")) == 2)
        await site.all_serving()
        assert "tiny-0 was killed by SIGKILL; starting it again" in caplog.text
        assert first.is_lost, "its agent has nothing more to do, and leaves its place"


async def test_a_file_that_an_engine_refuses_is_not_tried_again() -> None:
    script = Script(failing={"tiny-0": "model.safetensors is truncated"})
    async with site_on_nodes({"10.0.0.1": 1}, script) as (site, _):
        failure = await site.failure()
        assert isinstance(failure, ConfigError)
        assert "model.safetensors is truncated" in str(failure)
        assert len(site.pids("tiny-0")) == 1


async def test_a_node_with_another_version_is_refused_by_name() -> None:
    async with site_on_nodes({"10.0.0.1": 0}, is_awaited=False) as (site, cluster):
        cluster.version = "0.0.9"
        cluster.room["10.0.0.1"] = 1
        failure = await site.failure()
        assert "the node 10.0.0.1: has Headrace 0.0.9" in str(failure)
        assert "Install the same version" in str(failure)


async def test_a_replica_without_a_place_waits_and_ends_at_once_when_it_is_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with site_on_nodes({"10.0.0.1": 1}, models={"tiny": 2}) as (site, cluster):
        await asyncio.sleep(PLACE_NOTICE_S + 1)
        waiting = [agent for agent in cluster.agents if not agent.node]
        assert (len(waiting), len(listed(site))) == (1, 1)
        assert "waits for a node that has room for it" in caplog.text
        site.scale_file(tiny=1)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        await eventually(lambda: len(cluster.on("10.0.0.1")) == 1 and all(agent.is_lost or agent.node for agent in cluster.agents))


def is_asked_for(cluster: ScriptedCluster, number: int) -> bool:
    return cluster.requests[-1] == number


async def test_the_cluster_is_asked_for_what_is_wanted_and_for_less_when_less_is() -> None:
    async with site_on_nodes({"10.0.0.1": 9}, models={"tiny": 2}) as (site, cluster):
        assert cluster.requests == [2]
        for number in (4, 1):
            assert (await site.do("scale", model="tiny", replicas=number))[-1]["event"] == "done"
            await eventually(partial(is_asked_for, cluster, number))
    assert cluster.requests[-1] == 0, "nothing is left that the cluster would keep machines for"


async def test_a_request_that_fails_is_made_again_and_the_last_one_too() -> None:
    async with site_on_nodes({"10.0.0.1": 9}, models={"tiny": 2}) as (site, cluster):
        cluster.deaf = 1
        assert (await site.do("scale", model="tiny", replicas=3))[-1]["event"] == "done"
        await eventually(partial(is_asked_for, cluster, 3))
        cluster.deaf = 2
    assert (cluster.deaf, cluster.requests[-1]) == (0, 0)


async def test_a_cluster_that_answers_no_more_does_not_hold_the_end(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.get_running_loop().time()
    async with site_on_nodes({"10.0.0.1": 9}) as (_, cluster):
        cluster.deaf = 10**6
    assert asyncio.get_running_loop().time() - began < LAST_REQUEST_S + 5
    assert "the cluster may keep machines" in caplog.text


async def test_a_model_is_named_on_nodes_by_what_the_file_says() -> None:
    """The bundled model has its folder in each node's installation."""
    spec = ModelSpec(name="tiny", folder=Path("/elsewhere/of/the/supervisor"), sources={"/elsewhere/of/the/supervisor": "headrace-tiny"})
    async with site_on_nodes({"10.0.0.1": 1}, specs=(spec,)) as (site, _):
        assert site.process("tiny-0").config["engine"]["model"] == str(bundled_path("headrace-tiny"))


async def test_a_model_that_a_node_does_not_have_is_refused_with_the_nodes_reason() -> None:
    spec = ModelSpec(name="tiny", folder=Path("/x"), sources={"/x": "/srv/none/model.gguf"})
    async with site_on_nodes({"10.0.0.1": 1}, specs=(spec,)) as (site, _):
        failure = await site.failure()
        assert "there is no file /srv/none/model.gguf" in str(failure)


async def test_engines_on_nodes_are_asked_to_leave_and_their_last_status_is_theirs() -> None:
    async with site_on_nodes({"10.0.0.1": 2}, models={"tiny": 2}) as (site, _):
        processes = [site.process(name) for name in ("tiny-0", "tiny-1")]
        assert (await site.do("drain", within_s=5))[-1]["event"] == "done"
        await eventually(site.running.done)
        assert [process.asked_at != [] and process.exited.result() for process in processes] == [0, 0]


async def test_a_reload_of_adapters_reaches_the_node(tmp_path: Path) -> None:
    specs = (ModelSpec(name="tiny", folder=Path("/m"), engine={"enable_lora": True}, adapters={"sql": str(tmp_path)}),)
    script = Script()
    async with site_on_nodes({"10.0.0.1": 1}, script, specs=specs) as (site, _):
        assert set(site.process("tiny-0").adapters) == {"sql"}
        more = (ModelSpec(name="tiny", folder=Path("/m"), engine={"enable_lora": True}, adapters={"sql": str(tmp_path), "law": "/b"}),)
        site.write_file(models=more)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert set(site.process("tiny-0").adapters) == {"sql", "law"}
        script.bad_adapters["/b"] = "is cut short"
        site.write_file(models=specs)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        site.write_file(models=more)
        [*_, answer] = await site.do("reload")
        assert "is cut short" in json.dumps(answer)
        assert len(site.pids("tiny-0")) == 1


async def test_engines_on_nodes_sleep_and_wake_on_command() -> None:
    script = Script()
    async with site_on_nodes({"10.0.0.1": 2}, script, models={"tiny": 2}) as (site, _):
        await site.all_serving()
        assert (await site.do("sleep", model="tiny", level="ram"))[-1] == {"event": "done"}
        assert script.asleep == {"tiny-0": "ram", "tiny-1": "ram"}
        assert (await site.do("wake", model="tiny"))[-1] == {"event": "done"}
        assert script.asleep == {}


async def test_the_reason_of_an_engine_that_cannot_sleep_travels() -> None:
    script = Script(awake_only={"tiny-0": "a replica of several ranks does not sleep"})
    async with site_on_nodes({"10.0.0.1": 1}, script) as (site, cluster):
        [*_, said] = await site.do("sleep", model="tiny")
        assert said["event"] == "refused"
        assert "several ranks" in said["reason"]
        script.awake_only.clear()
        script.num_open["tiny-0"] = 1
        sleeping = asyncio.create_task(site.do("sleep", model="tiny"))
        await asyncio.sleep(5)
        cluster.lose_node("10.0.0.1")
        cluster.room["10.0.0.2"] = 1
        assert "done" not in {each["event"] for each in await sleeping}


async def test_adapters_that_a_reload_adds_are_named_on_nodes_by_what_the_file_says() -> None:
    one = ModelSpec(name="tiny", folder=Path("/m"), engine={"enable_lora": True})
    sources = {"/elsewhere/adapter": "pirate"}
    more = replace(one, adapters={"sql": "/elsewhere/adapter"}, sources=sources)
    async with site_on_nodes({"10.0.0.1": 1}, specs=(one,)) as (site, _):

        def paths() -> list[str]:
            return [each["path"] for each in site.process("tiny-0").config["engine"].get("lora_modules", ())]

        here = [str(bundled_adapter("pirate"))]
        site.write_file(models=(more,))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert paths() == here
        site.process("tiny-0").kill()
        await eventually(lambda: len(site.pids("tiny-0")) == 2)
        await site.all_serving()
        assert paths() == here


async def test_a_refused_reload_leaves_nodes_the_names_before() -> None:
    first = ModelSpec(
        name="tiny",
        folder=Path("/m"),
        engine={"enable_lora": True},
        adapters={"sql": "/elsewhere/adapter"},
        sources={"/elsewhere/adapter": "pirate"},
    )
    missing = replace(first, adapters={"none": "/elsewhere/none"}, sources={"/elsewhere/none": "/srv/none"})
    async with site_on_nodes({"10.0.0.1": 1}, specs=(first,)) as (site, _):
        before = site.process("tiny-0").config
        site.write_file(models=(missing,))
        [*_, said] = await site.do("reload")
        assert said["event"] == "refused"
        assert "there is no folder '/elsewhere/none'" in said["reason"]
        assert site.process("tiny-0").config == before
