"""Tests adapters of a deployment that runs: loaded and unloaded by commands, changed by a reload, kept over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site

from headrace.fleet.config import ModelSpec

pytestmark = pytest.mark.loop


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("sql", "law", "med"):
        (tmp_path / "root" / name).mkdir(parents=True)
    return tmp_path / "root"


def adapted(root: Path, *names: str, replicas: int = 2) -> ModelSpec:
    """A model with these adapters in the file."""
    adapters = {name: str(root / name) for name in names}
    return ModelSpec(name="tiny", folder=Path("none"), replicas=replicas, engine={"enable_lora": True}, adapters=adapters)


@asynccontextmanager
async def adapted_site(root: Path, *names: str, script: Script | None = None, replicas: int = 2) -> AsyncIterator[ScriptedSite]:
    """Deployments of one test share their state folder."""
    gateway = {"state": str(root.parent)}
    model = adapted(root, *names, replicas=replicas)
    async with scripted_site(script, specs=(model,), gateway=gateway, lora_root=None if root is None else str(root)) as site:
        await site.all_serving()
        yield site


def served(site: ScriptedSite, *labels: str) -> list[dict[str, str]]:
    """What the engines have, by their own account."""
    return [site.process(label).adapters for label in labels or ("tiny-0", "tiny-1")]


def digests(root: Path, *names: str) -> dict[str, str]:
    return {name: f"digest of {root / name}" for name in names}


def rows(site: ScriptedSite) -> dict[str, tuple[Any, ...]]:
    return {str(row["name"]): (row["origin"], row["digest"], row["state"]) for row in site.adapters()}


async def test_an_adapter_is_loaded_into_every_replica_and_unloaded_without_a_rollout(root: Path) -> None:
    async with adapted_site(root, "law") as site:
        num_processes = len(site.launcher.launched)
        said = await site.do("load-adapter", name="sql", path="sql")
        assert said == [{"event": "progress", "text": f"tiny: sql is loaded from {root / 'sql'}"}, {"event": "done"}]
        assert served(site) == [digests(root, "law", "sql")] * 2
        assert rows(site) == {
            "law": ("configuration", f"digest of {root / 'law'}", ""),
            "sql": ("run time", f"digest of {root / 'sql'}", ""),
        }
        for label in ("tiny-0", "tiny-1"):
            law, sql = site.started_with(label)["lora_modules"]
            assert (law["is_optional"], sql["is_optional"]) == (False, True), "a start goes on without it"
            assert (law["root"], sql["root"]) == (None, str(root)), "the engine looks where links lead when it reads the files"
        assert (await site.do("unload-adapter", name="sql"))[-1] == {"event": "done"}
        assert served(site) == [digests(root, "law")] * 2
        assert len(site.launcher.launched) == num_processes
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "serving"}


async def test_one_refusal_takes_it_back_everywhere(root: Path) -> None:
    script = Script()
    async with adapted_site(root, "law", script=script) as site:
        assert (await site.do("load-adapter", name="sql", path="sql"))[-1] == {"event": "done"}
        before = served(site), site.started_with("tiny-0"), (root.parent / "adapters.json").read_bytes()
        for name in ("med", "sql"):  # a new one, and one that is served from another folder
            script.bad_adapters = {str(root / "med"): "r is 64, more than max_lora_rank"}
            refused = {"event": "refused", "reason": "tiny-0: r is 64, more than max_lora_rank"}
            assert await site.do("load-adapter", name=name, path="med") == [refused]
            assert (served(site), site.started_with("tiny-0"), (root.parent / "adapters.json").read_bytes()) == before
        script.bad_adapters.clear()
        script.refusals = ["the disk is slow"]
        assert await site.do("load-adapter", name="med", path="med") == [{"event": "refused", "reason": "tiny-0: the disk is slow"}]
        assert (served(site), site.started_with("tiny-0"), (root.parent / "adapters.json").read_bytes()) == before


async def test_an_engine_that_does_not_answer_refuses(root: Path) -> None:
    script = Script(holding={"tiny-1"})
    async with adapted_site(root, script=script) as site:
        loading = asyncio.create_task(site.do("load-adapter", name="sql", path="sql"))
        await eventually(lambda: served(site, "tiny-0") == [digests(root, "sql")])
        script.holding.clear()
        assert (await loading)[-1] == {"event": "refused", "reason": "tiny-1: tiny-1 did not answer within 60 s"}
        assert served(site) == [{}, {}]


async def test_what_was_loaded_survives_a_restart_of_the_engine_and_of_the_deployment(root: Path) -> None:
    async with adapted_site(root, "law") as site:
        assert (await site.do("load-adapter", name="sql", path=str(root / "sql")))[-1] == {"event": "done"}
        site.process("tiny-0").kill()
        await eventually(lambda: len(site.pids("tiny-0")) == 2)
        assert (await site.do("scale", model="tiny", replicas=3))[-1] == {"event": "done"}
        await site.all_serving()
        assert served(site, "tiny-0", "tiny-1", "tiny-2") == [digests(root, "law", "sql")] * 3
    async with adapted_site(root, "law") as site:
        assert served(site) == [digests(root, "law", "sql")] * 2
        assert (await site.do("unload-adapter", name="sql"))[-1] == {"event": "done"}
    async with adapted_site(root, "law") as site:
        assert served(site) == [digests(root, "law")] * 2


async def test_what_cannot_be_used_any_more_keeps_nothing_from_starting(root: Path) -> None:
    """Its folder may be gone, or its files may be damaged, which only engines see."""
    (root / "tax").mkdir()
    async with adapted_site(root) as site:
        for name in ("sql", "tax", "law", "med"):
            assert (await site.do("load-adapter", name=name, path=name))[-1] == {"event": "done"}
    (root / "sql").rmdir()
    (root / "tax").rmdir()
    script = Script(bad_adapters={str(root / "law"): "is cut short"})
    async with adapted_site(root, script=script) as site:
        assert served(site) == [digests(root, "med")] * 2
        assert {name: state for name, (_, _, state) in rows(site).items()} == {
            "sql": f"left out: there is no folder {str(root / 'sql')!r}",
            "tax": f"left out: there is no folder {str(root / 'tax')!r}",
            "law": "not at tiny-0, tiny-1: the log says why",
            "med": "",
        }
        assert (await site.do("unload-adapter", name="tax"))[-1] == {"event": "done"}
        script.bad_adapters.clear()
        (root / "sql").mkdir()
        for name in ("law", "sql"):
            assert (await site.do("load-adapter", name=name, path=name))[-1] == {"event": "done"}
        assert served(site) == [digests(root, "sql", "law", "med")] * 2
        assert {state for _, _, state in rows(site).values()} == {""}


async def test_an_engine_that_starts_meanwhile_takes_the_list_once_it_serves(root: Path) -> None:
    script = Script()
    async with adapted_site(root, script=script, replicas=1) as site:
        script.loading.add("tiny-1")
        scaling = asyncio.create_task(site.do("scale", model="tiny", replicas=2))
        await eventually(lambda: site.is_launched("tiny-1"))
        await site.idle()
        assert (await site.do("load-adapter", name="sql", path="sql"))[-1] == {"event": "done"}
        assert served(site) == [digests(root, "sql"), {}]
        script.loading.clear()
        assert (await scaling)[-1] == {"event": "done"}
        await eventually(lambda: served(site) == [digests(root, "sql")] * 2)


async def test_an_engine_that_is_being_started_does_not_fail_by_a_load_that_is_refused(root: Path) -> None:
    """It reads its file while another engine has not answered yet."""
    script = Script(dying={"tiny-1"}, bad_adapters={str(root / "med"): "r is 64, more than max_lora_rank"})
    async with adapted_site(root, "law", script=script, replicas=1) as site:
        await site.do("scale", model="tiny", replicas=2)
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "failed"}, "it is tried again later"
        script.dying.clear()
        script.holding.add("tiny-0")
        loading = asyncio.create_task(site.do("load-adapter", name="sql", path="med"))
        await eventually(lambda: served(site, "tiny-1") == [digests(root, "law")])
        assert not loading.done()
        assert (await loading)[-1] == {"event": "refused", "reason": "tiny-0: tiny-0 did not answer within 60 s"}
        await site.all_serving()
        assert served(site) == [digests(root, "law")] * 2


async def test_an_engine_that_dies_while_a_load_is_refused_is_started_again_without_the_adapter(root: Path) -> None:
    script = Script(holding={"tiny-0", "tiny-1"}, bad_adapters={str(root / "med"): "r is 64, more than max_lora_rank"})
    async with adapted_site(root, "law", script=script) as site:
        loading = asyncio.create_task(site.do("load-adapter", name="sql", path="med"))
        await eventually(lambda: len(site.started_with("tiny-1")["lora_modules"]) == 2)
        site.process("tiny-1").kill()
        await eventually(lambda: len(site.pids("tiny-1")) == 2 and site.process("tiny-1").ready.done())
        assert not loading.done()
        assert served(site, "tiny-1") == [digests(root, "law")]
        assert (await loading)[-1] == {"event": "refused", "reason": "tiny-0: tiny-0 did not answer within 60 s"}
        assert len(site.pids("tiny-1")) == 2
        assert served(site) == [digests(root, "law")] * 2


async def test_a_load_that_is_cancelled_leaves_the_list_before_it(root: Path) -> None:
    """Nothing is required of an engine that is started again."""
    script = Script(holding={"tiny-1"})
    async with adapted_site(root, "law", script=script) as site:
        assert site._operator is not None
        assert site._operator._server is not None
        loading = asyncio.create_task(site._operator._server._control.adapters.load("sql", "sql", None, lambda _: None))
        await eventually(lambda: served(site, "tiny-0") == [digests(root, "law", "sql")])
        assert [each["is_optional"] for each in site.started_with("tiny-1")["lora_modules"]] == [False, False]
        script.holding.clear()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert served(site) == [digests(root, "law")] * 2
        assert list(rows(site)) == ["law"]
        for label in ("tiny-0", "tiny-1"):
            assert [each["name"] for each in site.started_with(label)["lora_modules"]] == ["law"]
        assert (await site.do("load-adapter", name="sql", path="sql"))[-1] == {"event": "done"}


async def test_a_reload_changes_adapters_of_running_engines_and_the_file_wins(root: Path) -> None:
    async with adapted_site(root, "law") as site:
        num_processes = len(site.launcher.launched)
        assert (await site.do("load-adapter", name="sql", path="sql"))[-1] == {"event": "done"}
        said = await site.do("unload-adapter", name="law")
        assert said[0]["text"] == "tiny: law is unloaded until the next reload or restart: the configuration lists it"
        assert served(site) == [digests(root, "sql")] * 2
        assert rows(site)["law"] == ("configuration", None, "unloaded until the next reload")
        assert (await site.do("unload-adapter", name="law"))[-1]["reason"].startswith("NAME: 'law' is not an adapter here.")
        site.write_file(models=(replace(adapted(root, "law", "med"), adapters={"law": str(root / "law"), "sql": str(root / "med")}),))
        said = await site.do("reload")
        assert said[-1] == {"event": "done"}
        clash = "the adapter sql of tiny, loaded at run time, is left out: sql is an adapter of tiny in the configuration"
        assert clash in [line["text"] for line in said[:-1]]
        assert served(site) == [{"law": f"digest of {root / 'law'}", "sql": f"digest of {root / 'med'}"}] * 2
        assert len(site.launcher.launched) == num_processes
        assert (await site.do("load-adapter", name="sql", path="sql"))[-1]["reason"].startswith("NAME: 'sql' is an adapter of tiny in the")
        site.write_file(models=(adapted(root),))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert served(site) == [digests(root, "sql")] * 2, "its name is free again"


@pytest.mark.parametrize("by", ["engine", "gateway"])
async def test_a_reload_that_is_refused_leaves_the_adapters_as_they_were(by: str, root: Path) -> None:
    script = Script()
    async with adapted_site(root, "law", script=script) as site:
        assert (await site.do("unload-adapter", name="law"))[-1] == {"event": "done"}
        if by == "engine":
            script.bad_adapters[str(root / "med")] = "no"
        else:
            script.holding.add("gateway")
        site.write_file(models=(replace(adapted(root, "sql", "med"), aliases=("small",)),))
        assert (await site.do("reload"))[-1]["event"] == "refused"
        assert served(site) == [{}, {}]
        assert rows(site)["law"][2] == "unloaded until the next reload"


async def test_options_that_change_with_the_adapters_are_a_rollout(root: Path) -> None:
    """The old engines would refuse what only the new ones can take."""
    script = Script(bad_adapters={})
    async with adapted_site(root, script=script) as site:
        bigger = replace(adapted(root, "sql"), engine={"enable_lora": True, "max_lora_rank": 64})
        site.write_file(models=(bigger,))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert served(site) == [{}, {}]
        assert served(site, "tiny-2", "tiny-3") == [digests(root, "sql")] * 2


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"name": "sql", "path": "../sql"}, "PATH: '../sql' is not below lora_root"),
        ({"name": "sql", "path": "none"}, "PATH: there is no folder 'none'"),
        ({"name": "a b", "path": "sql"}, "NAME: 'a b' is not a model name"),
        ({"name": "tiny", "path": "sql"}, "NAME: 'tiny' is a model's name"),
        ({"name": "sql", "path": "sql", "model": "other"}, "--model: 'other' has no adapters. Models with adapters: tiny."),
    ],
)
async def test_a_fault_changes_nothing(body: dict[str, str], word: str, root: Path) -> None:
    async with adapted_site(root, "law", replicas=1) as site:
        [refused] = await site.do("load-adapter", **body)
        assert refused["event"] == "refused"
        assert refused["reason"].startswith(word)
        assert served(site, "tiny-0") == [digests(root, "law")]
        assert not (root.parent / "adapters.json").exists()


async def test_a_state_folder_that_cannot_be_written_takes_it_back(root: Path) -> None:
    async with adapted_site(root, replicas=1) as site:
        (root.parent / "adapters.json").mkdir()
        [refused] = await site.do("load-adapter", name="sql", path="sql")
        assert (refused["event"], "cannot be written" in refused["reason"]) == ("refused", True)
        assert served(site, "tiny-0") == [{}]


async def test_a_model_without_adapters_says_so() -> None:
    async with scripted_site() as site:
        [refused] = await site.do("load-adapter", name="sql", path="sql")
        assert refused["reason"].startswith("--model: no model here has adapters. Set enable_lora")
        assert site.adapters() == []
