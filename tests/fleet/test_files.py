"""Tests the files that the supervisor writes for its children."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.config.sections import ModelSection, ServeConfig
from headrace.core.errors import ConfigError
from headrace.core.hashing import BLOCKS, SALTS, site_secret
from headrace.engine.config import EngineConfig
from headrace.engine.server.config import ProcessConfig, process_config_from
from headrace.fleet import files
from headrace.fleet.config import COMMAND, FleetConfig, ModelSpec
from headrace.fleet.files import (
    ReplicaFiles,
    gateway_content,
    is_running,
    run_dir,
    running_deployments,
    write_engine_files,
    write_gateway_file,
)
from headrace.machine.gpus import Gpus
from headrace.machine.resources import MachineShare, share_of

pytestmark = pytest.mark.pure

TWO_MODELS = FleetConfig(
    models=(
        ModelSpec(name="org-big-model", folder=Path("/m/big"), aliases=("big",), replicas=2, engine={"max_num_seqs": 8}),
        ModelSpec(name="small", folder=Path("/m/small")),
    ),
    gateway={"port": 0, "timeouts": {"failover_s": 5}},
    drain_timeout_s=7,
)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's own: a deployment's sockets lie below it, and their paths are short."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder)


def write_all(config: FleetConfig, folder: Path) -> list[ReplicaFiles]:
    """One for each replica, as at the start of a deployment."""
    models = [(model, f"{model.name}-{index}") for model in config.models for index in range(model.replicas)]
    return [
        write_engine_files(config, model, folder, name=name, number=number, share=MachineShare(number, len(models)))
        for number, (model, name) in enumerate(models)
    ]


def test_each_replica_gets_a_file_of_its_own_and_the_gateway_knows_them_all(tmp_path: Path) -> None:
    replicas = write_all(TWO_MODELS.checked(), tmp_path)
    assert [replica.name for replica in replicas] == ["org-big-model-0", "org-big-model-1", "small-0"]
    first = json.loads(replicas[0].config.read_text())
    assert first["engine"] == {"max_num_seqs": 8, "model": "/m/big"}
    assert first["num_neighbours"] == 2
    assert first["address"] == f"unix:{tmp_path}/e0.sock"
    assert stat.S_IMODE(replicas[0].config.stat().st_mode) == 0o600
    gateway = json.loads(write_gateway_file(gateway_content(TWO_MODELS, replicas), tmp_path).read_text())
    assert gateway["timeouts"] == {"failover_s": 5, "drain_s": 7}
    assert [[replica["name"] for replica in model["replicas"]] for model in gateway["models"]] == [
        ["org-big-model-0", "org-big-model-1"],
        ["small-0"],
    ]
    assert (gateway["port"], gateway["models"][0]["aliases"], gateway["models"][1]["folder"]) == (0, ["big"], "/m/small")


def test_every_process_of_a_site_is_given_the_same_keys(tmp_path: Path) -> None:
    config = TWO_MODELS.checked().with_site_key()
    replicas = write_all(config, tmp_path)
    [key] = {json.loads(replica.config.read_text())["block_key"] for replica in replicas}
    gateways = [json.loads(write_gateway_file(gateway_content(config, replicas), tmp_path).read_text()) for _ in range(2)]
    assert len(bytes.fromhex(key)) == 32
    assert len(bytes.fromhex(gateways[0]["salt_key"])) == 32
    assert gateways[0]["salt_key"] == gateways[1]["salt_key"] != key, "a gateway that is started again is told the same"
    assert TWO_MODELS.with_site_key().site_key != config.site_key, "another start draws another one"
    assert config.site_key not in repr(config)


def test_a_configured_key_is_kept_and_must_be_hex(tmp_path: Path) -> None:
    assert replace(TWO_MODELS, site_key="ab" * 16).checked().with_site_key().site_key == "ab" * 16
    replace(TWO_MODELS, site_key="AB" * 64).checked()
    for wrong in ("aa", "ab" * 15, "a" * 33, "xy" * 16, "ab" * 65):
        with pytest.raises(ConfigError, match="site_key: is not an even number of 32 to 128 hex digits") as refused:
            replace(TWO_MODELS, site_key=wrong).checked()
        assert wrong not in str(refused.value)


def test_one_key_gives_starts_of_any_kind_the_same_secrets_for_each_purpose(tmp_path: Path) -> None:
    config = replace(TWO_MODELS, site_key="ab" * 16).checked()
    started = json.loads(write_all(config, tmp_path)[0].config.read_text())
    by_hand, _ = process_config_from({"replica": "r", "address": "unix:/r", "site_key": "AB" * 16, "engine": {"model": "m"}})
    assert started["block_key"] == by_hand.block_key == site_secret("ab" * 16, BLOCKS)
    assert gateway_content(config)["salt_key"] == site_secret("ab" * 16, SALTS)
    assert len({site_secret(key, purpose) for key in ("ab" * 16, "cd" * 16) for purpose in (BLOCKS, SALTS)}) == 4
    assert gateway_content(TWO_MODELS)["salt_key"] == "", "a gateway by hand draws its own"


def test_a_model_of_a_foreign_server_has_no_engine(tmp_path: Path) -> None:
    far = ModelSpec(name="far", aliases=("f",), replicas=0, upstreams=({"url": "http://127.0.0.1:9000/v1"},))
    config = FleetConfig(models=(far, ModelSpec(name="small", folder=Path("/m/small"))), gateway={"port": 0}).checked()
    replicas = write_all(config, tmp_path)
    assert [replica.model for replica in replicas] == ["small"]
    gateway = json.loads(write_gateway_file(gateway_content(config, replicas), tmp_path).read_text())
    assert gateway["models"][0] == {"name": "far", "aliases": ["f"], "upstreams": [{"url": "http://127.0.0.1:9000/v1"}]}


def test_the_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with run_dir(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_what_a_killed_supervisor_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, unfinished, foreign = (tmp_path / name for name in ("headrace-dead", "headrace-new", "other-thing"))
    for folder in (dead, unfinished, foreign):
        folder.mkdir()
        (folder / "gateway.json").write_text("{}")
    for folder in (dead, foreign):
        (folder / "lock").touch()
    with run_dir(tmp_path) as first, run_dir(tmp_path) as second:
        assert first.is_dir()
        assert second.is_dir()
        assert not dead.exists()
        assert unfinished.is_dir()
        assert foreign.is_dir()


def test_what_only_looks_like_a_lock_neither_stops_us_nor_is_removed(tmp_path: Path) -> None:
    pipe, link, linked = (tmp_path / name for name in ("headrace-pipe", "headrace-link", "headrace-linked"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (pipe, link, elsewhere):
        folder.mkdir()
    os.mkfifo(pipe / "lock")
    (elsewhere / "lock").touch()
    (link / "lock").symlink_to(elsewhere / "lock")
    linked.symlink_to(elsewhere)
    with run_dir(tmp_path):  # the failure is to hang, until the test's time limit: opening a pipe waits for its writer
        pass
    assert pipe.is_dir()
    assert link.is_dir()
    assert (elsewhere / "lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else's")
def test_a_folder_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "headrace-foreign"
    foreign.mkdir()
    (foreign / "lock").touch()
    os.chown(foreign, 12345, 12345)
    with run_dir(tmp_path):
        assert (foreign / "lock").exists()


def test_deployments_that_run_are_found_and_dead_ones_are_not(tmp_path: Path) -> None:
    dead = tmp_path / "headrace-dead"
    dead.mkdir()
    (dead / "lock").touch()
    assert running_deployments(tmp_path) == []
    with run_dir(tmp_path) as first, run_dir(tmp_path) as second:
        assert running_deployments(tmp_path) == sorted([first, second])
        assert is_running(first)
        assert not is_running(tmp_path)
    assert not is_running(first)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else's")
def test_the_superuser_finds_a_deployment_of_another_user_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.files._default_parent", lambda: tmp_path)
    with run_dir(tmp_path) as folder:
        for path in (folder, folder / "lock"):
            os.chown(path, 12345, 12345)
        assert running_deployments(tmp_path) == [folder]
        assert running_deployments(None) == []


def test_the_standard_place_is_used_only_when_it_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "r"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr("headrace.fleet.files.MAX_DIR_BYTES", 1000)
    with run_dir(None) as folder:
        assert folder.parent == place
    place.chmod(0o755)
    with run_dir(None) as folder:
        assert folder.parent != place


def test_a_path_too_long_for_sockets_is_refused_and_not_left_behind(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="short path"), run_dir(deep):
        pass
    assert list(deep.iterdir()) == []
    with pytest.raises(ConfigError, match="run_dir"), run_dir(tmp_path / "none"):
        pass


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (FleetConfig(models=()), "models"),
        (FleetConfig(models=(ModelSpec(name="a b", folder=Path("/m")),)), "model name"),
        (FleetConfig(models=(ModelSpec(name="a", folder=Path("/m"), aliases=("a",)),)), "served twice"),
        (FleetConfig(models=(ModelSpec(name="a", folder=Path("/m"), replicas=0),)), "replicas"),
        (FleetConfig(models=(ModelSpec(name="a", folder=Path("/m"), engine={"model": "x"}),)), "engine.model"),
        (FleetConfig(models=(ModelSpec(name="a", folder=Path("/m")),), gateway={"models": []}), "gateway.models"),
        (FleetConfig(models=(ModelSpec(name="a", folder=Path("/m")),), drain_timeout_s=-1), "drain_timeout_s"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_by_name(config: FleetConfig, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config.checked()


@pytest.mark.parametrize(("num_threads", "divided"), [(None, True), (1, False)])
def test_engines_are_told_their_cpus_unless_threads_were_chosen(tmp_path: Path, num_threads: int | None, divided: bool) -> None:
    """Through the configuration that `headrace serve` decodes, where an option nobody set is None and not absent."""
    model = ModelSection(engine=EngineConfig(model="m", num_threads=num_threads), replicas=2)
    config = ServeConfig(models=(model,)).fleet(Path)
    told = [json.loads(replica.config.read_bytes())["cpus"] for replica in write_all(config, tmp_path)]
    cpus = sorted(os.sched_getaffinity(0))
    assert told == ([",".join(map(str, share_of(cpus, MachineShare(number, 2)))) for number in range(2)] if divided else ["", ""])


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("0",), [("0", 2), ("0", 2), ("0", 2)]),
        (("3", "5"), [("3", 1), ("5", 0), ("3", 1)]),
        (("0", "1", "2", "3"), [("0", 0), ("1", 0), ("2", 0)]),
        ((), [(None, 2), (None, 2), (None, 2)]),
    ],
)
def test_engines_are_dealt_the_gpus_and_divide_the_memory_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], told: list[tuple[str | None, int]]
) -> None:
    monkeypatch.setattr(files, "find_gpus", lambda: Gpus(names))
    for device, expected in (("cuda", told), ("cpu", [(None, 2)] * 3)):
        config = ServeConfig(models=(ModelSection(engine=EngineConfig(model="m", device=device), replicas=3),)).fleet(Path)
        written = [json.loads(replica.config.read_bytes()) for replica in write_all(config, tmp_path)]
        assert [(content.get("gpu"), content["num_neighbours"]) for content in written] == expected


def test_engines_are_bound_to_no_cpu_where_the_system_does_not_say_which_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no such call: `headrace serve` ended with a traceback there."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    config = ServeConfig(models=(ModelSection(engine=EngineConfig(model="m"), replicas=2),)).fleet(Path)
    written = [json.loads(replica.config.read_bytes()) for replica in write_all(config, tmp_path)]
    assert [content["cpus"] for content in written] == ["", ""]
    process = ProcessConfig(replica="a", address="unix:/a", num_neighbours=1)
    process.keep_to_share()


@pytest.mark.process
def test_modules_lying_in_the_current_directory_are_not_run(tmp_path: Path) -> None:
    """`cd downloaded-model && headrace serve .` must run nothing of what was downloaded."""
    for module in ("typer", "json", "torch", "headrace"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} was run from the current directory')")
    done = subprocess.run([*COMMAND, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headrace ")


def test_engines_divide_the_cpus_of_the_machine() -> None:
    assert share_of([0, 1], MachineShare(0, 1)) == []
    assert [share_of([0, 1], MachineShare(number, 2)) for number in range(2)] == [[0], [1]]
    assert [share_of([3, 5, 7, 9, 11], MachineShare(number, 2)) for number in range(2)] == [[3, 5], [7, 9, 11]]
    assert [share_of([0, 1], MachineShare(number, 5)) for number in range(5)] == [[0], [1], [0], [1], [0]]


def test_a_full_disk_is_refused_with_its_path(tmp_path: Path) -> None:
    """It was a traceback that named no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run_dir(tmp_path) as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # what is written beyond it fails, as on a disk without room
        try:
            with pytest.raises(ConfigError, match=f"run_dir: {folder}/e0.json cannot be written .File too large.*Free space there"):
                write_all(TWO_MODELS, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
