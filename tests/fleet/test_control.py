"""A deployment changed while it runs: commands over its admin socket and SIGHUP. Real processes; engines and gateway are fakes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from wire_kit import PATIENCE_S, socket_dir, until

from headrace.cli.control_client import AdminClient, find_deployment
from headrace.cli.exits import ServerFailed
from tests.fleet.test_supervisor import Fleet, is_alive

TINY = {"tiny": {"replicas": 1}}


class Site(Fleet):
    """A supervisor and an operator in front of it. `answer` collects what the last command said."""

    def write(self, **changes: Any) -> None:
        """The file, to be read at the next reload."""
        path = self.folder / "fleet.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    @property
    def admin(self) -> AdminClient:
        return AdminClient(find_deployment(self.folder))

    def do(self, command: str, **body: Any) -> list[dict[str, Any]]:
        return list(self.admin.command(command, body))

    def replicas(self, model: str = "tiny") -> dict[str, str]:
        """Name -> phase."""
        [found] = [each for each in self.admin.status()["models"] if each["name"] == model]
        return {replica["name"]: replica["phase"] for replica in found["replicas"]}

    def listed(self) -> dict[str, list[str]]:
        """Models and replicas in the gateways' file."""
        written = json.loads((self.run_dir / "gateway.json").read_text())
        return {model["name"]: [replica["name"] for replica in model["replicas"]] for model in written["models"]}

    def pid_of(self, name: str) -> int:
        replicas = [replica for model in self.admin.status()["models"] for replica in model.get("replicas", ())]
        [pid] = [replica["pid"] for replica in replicas if replica["name"] == name]
        return int(pid)

    def hold_open(self, **numbers: int) -> None:
        """How many requests the gateway has open at each replica."""
        new = self.folder / "open.new"
        new.write_text(json.dumps({name.replace("_", "-"): number for name, number in numbers.items()}))
        new.rename(self.folder / "open.json")


def parts_of_the_machine(site: Site) -> list[int]:
    """Neighbours with which each engine shares memory, in the order of their files."""
    return [json.loads(path.read_text())["num_neighbours"] for path in sorted(site.run_dir.glob("e*.json"))]


@pytest.fixture
def start() -> Iterator[Callable[..., Site]]:
    started: list[Site] = []
    with socket_dir() as folder:

        def start_one(**config: Any) -> Site:
            started.append(Site(folder, **{"models": TINY, **config}))
            return started[-1]

        yield start_one
        for site in started:
            site.close()


Start = Callable[..., Site]


def texts(said: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in said if each["event"] == "progress"]


async def stopped(site: Site) -> None:
    site.process.send_signal(signal.SIGTERM)
    assert await site.wait() == 0
    assert not list(site.folder.glob("headrace-*"))


async def test_a_rollout_replaces_every_replica_by_a_new_process_under_a_new_name(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    before = {name: site.pid_of(name) for name in site.replicas()}
    said = site.do("rollout")
    assert said[-1] == {"event": "done"}
    assert texts(said) == [
        "tiny: revision 1 replaces 2 replicas, one at a time",
        "tiny: a successor sizes its KV cache by the memory that is free beside its predecessor; num_kv_blocks makes it a fixed size, "
        "--max-surge 0 ends the predecessor first",
        "tiny-2 is starting, for tiny-0",
        "tiny-2 serves",
        "tiny-0 is retired",
        "tiny-0 has left",
        "tiny-3 is starting, for tiny-1",
        "tiny-3 serves",
        "tiny-1 is retired",
        "tiny-1 has left",
        "tiny: every replica was replaced",
    ]
    assert site.replicas() == {"tiny-2": "serving", "tiny-3": "serving"}
    assert site.listed() == {"tiny": ["tiny-2", "tiny-3"]}
    assert not any(is_alive(pid) for pid in before.values())
    assert {path.name for path in site.run_dir.glob("e*")} == {"e2.json", "e2.sock", "e3.json", "e3.sock"}
    assert parts_of_the_machine(site) == [1, 1], "a successor gets the part of the machine of its predecessor"
    await stopped(site)


async def test_a_retired_replica_ends_when_its_last_request_has_left(start: Start) -> None:
    site = start(drain_timeout_s=30)
    site.hear()
    site.hold_open(tiny_0=3)
    pid = site.pid_of("tiny-0")
    rollout = asyncio.create_task(asyncio.to_thread(site.do, "rollout", model="tiny"))
    await until(lambda: site.replicas() == {"tiny-0": "draining", "tiny-1": "serving"})
    assert site.listed() == {"tiny": ["tiny-1"]}
    with pytest.raises(TimeoutError):  # it is still there after a while
        await until(lambda: not is_alive(pid), 0.5)
    refused = site.do("scale", model="tiny", replicas=3)
    assert refused[-1]["event"] == "refused"
    assert "rollout tiny is running" in refused[-1]["reason"]
    site.hold_open()
    assert (await rollout)[-1] == {"event": "done"}
    assert not is_alive(pid)
    assert "tiny-0 is retired, 3 requests open" in site.log
    await stopped(site)


async def test_what_is_open_after_the_drain_time_is_moved_by_ending_the_replica(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    site.hold_open(tiny_0=2)
    said = site.do("drain", replica="tiny-0", within_s=0.3)
    assert said[-1] == {"event": "done"}
    assert texts(said)[1:] == ["tiny-0 is ended, its 2 open requests move to other replicas", "tiny-0 has left"]
    assert site.replicas() == {"tiny-1": "serving"}
    [refused] = site.do("drain", replica="tiny-1", within_s=0.3)
    assert refused["reason"].startswith("tiny-1: is the last replica of tiny that serves.")
    [unknown] = site.do("drain", replica="tiny-0", within_s=0.3)
    assert unknown["reason"] == "tiny-0: is not a replica here. Replicas: tiny-1."
    assert site.do("drain", replica="tiny-1", within_s=0, allow_outage=True)[-1] == {"event": "done"}
    written = json.loads((site.run_dir / "gateway.json").read_text())["models"][0]
    assert (written["replicas"], written["unavailable"]) == ([], "It has no replica now.")
    assert site.do("reload")[-1] == {"event": "done"}, "the file's number holds again"
    assert site.replicas() == {"tiny-2": "serving", "tiny-3": "serving"}
    await stopped(site)


async def test_a_model_scales_up_and_down(start: Start) -> None:
    site = start()
    site.hear()
    assert site.do("scale", model="tiny", replicas=3)[-1] == {"event": "done"}
    assert set(site.replicas()) == {"tiny-0", "tiny-1", "tiny-2"}
    assert site.do("scale", model="tiny", replicas=1)[-1] == {"event": "done"}
    assert set(site.replicas()) == {"tiny-0"}
    assert site.do("scale", model="tiny", replicas=2)[-1] == {"event": "done"}
    assert set(site.replicas()) == {"tiny-0", "tiny-3"}, "no name is given twice"
    assert parts_of_the_machine(site) == [0, 1], "the first was started when it was alone"
    assert site.do("rollout")[-1] == {"event": "done"}
    assert parts_of_the_machine(site) == [1, 1]
    for body, word in (({"model": "tiny", "replicas": 0}, "outside 1..64"), ({"model": "other", "replicas": 1}, "Models: tiny")):
        [refused] = site.do("scale", **body)
        assert word in refused["reason"]
    await stopped(site)


async def test_a_reload_adds_and_removes_models_and_says_what_changed(start: Start) -> None:
    site = start()
    site.hear()
    site.write(models={"other": {"replicas": 2}})
    said = site.do("reload")
    assert said[-1] == {"event": "done"}
    assert texts(said)[0] == "- models.tiny", "the difference comes first"
    assert site.listed() == {"other": ["other-0", "other-1"]}
    assert [model["name"] for model in site.admin.status()["models"]] == ["other"]
    site.write(models={"tiny": {"replicas": 1}, "other": {"replicas": 2}})
    site.process.send_signal(signal.SIGHUP)
    await until(lambda: site.listed() == {"tiny": ["tiny-1"], "other": ["other-0", "other-1"]})
    await until(lambda: site.replicas() == {"tiny-1": "serving"})
    await stopped(site)


async def test_changed_options_of_a_model_are_a_rollout_of_that_model_alone(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}, "other": {}})
    site.hear()
    site.write(models={"tiny": {"replicas": 2, "engine": {"max_num_seqs": 3}}, "other": {}})
    assert site.do("reload")[-1] == {"event": "done"}
    assert site.listed() == {"tiny": ["tiny-2", "tiny-3"], "other": ["other-0"]}
    found = {json.loads(path.read_text())["replica"]: json.loads(path.read_text())["engine"] for path in site.run_dir.glob("e*.json")}
    assert found["tiny-2"] == {"max_num_seqs": 3, "model": "fake"}
    await stopped(site)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"models": {}}, "models: is empty"),
        ({"models": {"a b": {}}}, "model name"),
        ({"gateway": {"work": "idle", "host": "0.0.0.0"}}, "gateway.host: cannot change while the deployment runs"),
        ({"models": {"tiny": {"folder": "other"}}}, r"models[tiny]: cannot have another folder while the deployment runs"),
        ({"gateway": {"work": "idle", "refuse": "limits.x: no"}, "models": {"other": {}}}, "limits.x: no"),
    ],
)
async def test_a_fault_changes_nothing(start: Start, changes: Mapping[str, Any], word: str) -> None:
    site = start()
    site.hear()
    before = (site.run_dir / "gateway.json").read_text(), site.pid_of("tiny-0"), sorted(site.run_dir.iterdir())
    site.write(**changes)
    said = site.do("reload")
    assert said[-1]["event"] == "refused"
    assert word in said[-1]["reason"]
    assert ((site.run_dir / "gateway.json").read_text(), site.pid_of("tiny-0"), sorted(site.run_dir.iterdir())) == before
    site.process.send_signal(signal.SIGHUP)
    await until(lambda: "SIGHUP changed nothing" in site.log)
    site.write(models={"tiny": {"replicas": 2}}, gateway={"work": "idle"})
    assert site.do("reload")[-1] == {"event": "done"}
    await stopped(site)


async def test_an_engine_that_never_gets_ready_does_not_keep_back_what_serves(start: Start) -> None:
    site = start(models={"tiny": {}, "late": {}}, fake={"replicas": {"late-": {"hang_s": 60}}}, stragglers_s=0.3)
    ready = site.hear()
    assert (set(ready["replicas"]), ready["starting"], ready["failed"]) == ({"tiny-0"}, ["late-0"], {})
    await until(lambda: site.replicas() == {"tiny-0": "serving"})
    assert site.replicas("late") == {"late-0": "starting"}
    await stopped(site)


async def test_an_engine_that_cannot_start_fails_its_model_only_and_a_reload_tries_it_again(start: Start) -> None:
    site = start(models={"tiny": {}, "bad": {"replicas": 2}}, fake={"replicas": {"bad-": {"refuse": "/secret/path is truncated"}}})
    ready = site.hear()
    assert set(ready["replicas"]) == {"tiny-0"}
    assert set(ready["failed"]) == {"bad-0", "bad-1"}
    assert "/secret/path is truncated" in ready["failed"]["bad-0"]
    await until(lambda: site.listed() == {"tiny": ["tiny-0"], "bad": []})
    [written] = [model for model in json.loads((site.run_dir / "gateway.json").read_text())["models"] if model["name"] == "bad"]
    assert written["unavailable"] == "Its engine refused its configuration or weights."
    assert "/secret/path" not in (site.run_dir / "gateway.json").read_text()
    [bad] = [model for model in site.admin.status()["models"] if model["name"] == "bad"]
    assert "/secret/path is truncated" in bad["failure"]
    assert "/secret/path is truncated" in site.do("reload")[-1]["reason"], "tried again, and failed again"
    (site.folder / "fake.json").write_text("{}")
    site.write(fake={})
    site.write(models={"tiny": {}, "bad": {"replicas": 2, "folder": "another"}})
    assert site.do("reload")[-1] == {"event": "done"}, "no replica has the folder of before: it may be another"
    assert set(site.replicas("bad").values()) == {"serving"}
    await stopped(site)


async def test_a_successor_that_cannot_start_ends_the_rollout_and_the_old_replicas_serve_on(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    site.write(fake={"refuse": "no memory"})
    (site.folder / "fake.json").write_text('{"refuse": "no memory"}')
    said = site.do("rollout")
    assert (said[-1]["event"], said[-1]["reason"]) == ("failed", "tiny: tiny-2 cannot be started: fake: no memory.")
    assert site.replicas() == {"tiny-0": "serving", "tiny-1": "serving"}
    site.write(fake={})
    (site.folder / "fake.json").write_text("{}")
    assert site.do("rollout")[-1] == {"event": "done"}
    await stopped(site)


async def test_an_engine_that_ends_at_its_start_is_tried_again_after_a_pause(start: Start) -> None:
    site = start(models={"tiny": {}, "bad": {}}, fake={"replicas": {"bad-": {"die": True}}}, first_retry_s=1.0)
    assert site.hear()["failed"] == {"bad-0": "ended with status 9; it was started 3 times and never served."}
    await until(lambda: site.listed()["bad"] == [])
    assert '"Its engine ended before it served."' in (site.run_dir / "gateway.json").read_text()
    (site.folder / "fake.json").write_text("{}")
    await until(lambda: site.replicas("bad") == {"bad-0": "serving"})
    assert site.listed()["bad"] == ["bad-0"]
    await stopped(site)


async def test_a_successor_that_a_gateway_cannot_use_ends_the_rollout_with_its_reason(start: Start) -> None:
    site = start(connect_timeout_s=0.5, gateway={"work": "idle", "blind": ["tiny-1"]})
    site.hear()
    failed = site.do("rollout")[-1]
    assert failed["reason"] == (
        "tiny: tiny-1 cannot be started: serves, and a gateway does not find it ready after 0.5 s: another tokenizer"
    )
    assert site.listed() == {"tiny": ["tiny-0"]}
    await stopped(site)


async def test_without_surge_the_old_one_ends_first(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    said = site.do("rollout", model="tiny", max_surge=0)
    assert said[-1] == {"event": "done"}
    steps = [text.split(",")[0] for text in texts(said)][1:]
    assert steps[:4] == ["tiny-0 is retired", "tiny-0 has left", "tiny-2 is starting", "tiny-2 serves"]
    site.do("scale", model="tiny", replicas=1)
    [refused] = site.do("rollout", model="tiny", max_surge=0)
    assert "--max-surge 0: would leave no replica of tiny" in refused["reason"]
    assert site.do("rollout", model="tiny", max_surge=0, allow_outage=True)[-1] == {"event": "done"}
    await stopped(site)


async def test_a_drain_of_all_ends_the_deployment(start: Start) -> None:
    site = start(drain_timeout_s=600)
    site.hear()
    # Far less than the file's time, and more than a busy machine takes: at its end running requests would be cut.
    assert site.do("drain", within_s=20)[-1] == {"event": "done"}
    assert await site.wait() == 0
    assert not list(site.folder.glob("headrace-*"))


async def test_a_gateway_that_is_killed_in_a_rollout_reads_what_holds_when_it_is_back(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    rollout = asyncio.create_task(asyncio.to_thread(site.do, "rollout"))
    await until(lambda: "tiny-2 is starting" in site.log)
    os.kill(site.pids["gateway"], signal.SIGKILL)
    assert (await rollout)[-1] == {"event": "done"}
    assert site.listed() == {"tiny": ["tiny-2", "tiny-3"]}
    await stopped(site)


async def test_a_hangup_without_a_file_drains_and_an_ignored_one_does_nothing(start: Start) -> None:
    site = start(has_file=False)
    site.hear()
    [refused] = site.do("reload")
    assert refused["reason"].startswith("reload: this deployment was started without a file.")
    site.process.send_signal(signal.SIGHUP)
    assert await site.wait() == 0
    ignoring = start(ignores_hangup=True)
    ignoring.hear()
    ignoring.process.send_signal(signal.SIGHUP)
    assert ignoring.do("reload")[-1] == {"event": "done"}
    await stopped(ignoring)


async def test_a_terminal_that_is_closed_drains_although_there_is_a_file(start: Start) -> None:
    ours, theirs = os.openpty()
    site = start(terminal=os.ttyname(theirs))
    site.hear()
    os.close(theirs)
    os.close(ours)
    assert await site.wait() == 0


async def test_the_socket_is_its_users_alone_and_wants_the_token(start: Start) -> None:
    site = start()
    site.hear()
    for name in ("admin.sock", "admin.token"):
        assert stat.S_IMODE((site.run_dir / name).stat().st_mode) == 0o600
    assert find_deployment(site.folder) == find_deployment(site.run_dir) == site.run_dir
    (site.run_dir / "admin.token").write_text("another")
    with pytest.raises(ServerFailed, match="answered 401"):
        site.admin.status()
    await stopped(site)
    with pytest.raises(ServerFailed, match="no deployment"):
        find_deployment(site.folder)


async def test_a_command_goes_on_when_its_client_leaves(start: Start) -> None:
    site = start(models={"tiny": {"replicas": 2}})
    site.hear()
    lines = site.admin.command("rollout", {})
    assert next(lines)["event"] == "progress"
    lines.close()  # type: ignore[attr-defined]  # a generator
    await until(lambda: site.replicas() == {"tiny-2": "serving", "tiny-3": "serving"}, PATIENCE_S)
    await stopped(site)


@pytest.mark.parametrize(("name", "body"), [("scale", {"model": "tiny"}), ("rollout", {"modle": "tiny"}), ("rollout", {"max_surge": 2})])
async def test_a_body_with_a_fault_is_refused_by_name(start: Start, name: str, body: dict[str, Any]) -> None:
    site = start()
    site.hear()
    [refused] = site.do(name, **body)
    assert refused["event"] == "refused"


def test_no_deployment_is_found_where_none_runs(tmp_path: Path) -> None:
    (tmp_path / "headrace-dead").mkdir()
    (tmp_path / "headrace-dead" / "lock").touch()
    with pytest.raises(ServerFailed, match="no deployment"):
        find_deployment(tmp_path)
