"""Tests what a deployment knows of adapters: which folders may be loaded, and the file that keeps what operators loaded."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.adapters import ADAPTER_FILES
from headrace.core.errors import ConfigError
from headrace.fleet import adapters
from headrace.fleet.adapters import AdapterLists, folder_below, keep, read_kept, read_lists
from headrace.fleet.config import FleetConfig, ModelSpec

pytestmark = pytest.mark.pure


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A lora_root with the folder `sql`, and beside it a folder that no name may reach."""
    for folder in ("root/sql", "root/deep/sql", "outside/sql"):
        (tmp_path / folder).mkdir(parents=True)
    root = tmp_path / "root"
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "again").symlink_to("sql")
    (root / "loop").symlink_to("loop")
    (root / "file").touch()
    os.mkfifo(root / "fifo")
    return root


def test_a_folder_below_the_root_is_found_links_followed(root: Path) -> None:
    for path in ("sql", "./deep/../sql", "again", str(root / "sql"), f"{root}/../root/sql"):
        assert folder_below(root, path) == root / "sql", path
    link = root.with_name("link")
    link.symlink_to(root)
    assert folder_below(link, "deep/sql") == root / "deep" / "sql"
    assert folder_below(link, f"{link}/sql") == root / "sql"


@pytest.mark.parametrize(
    "path",
    [
        *("..", "../outside/sql", "sql/../../outside/sql", "/etc", "/", "", ".", "out", "out/sql", "out/../sql/../out/sql"),
        *("/dev/zero", "/dev/stdin", "/proc/self/root/etc", "/proc/self/cwd", "../root-of-another/sql", "~", "~root", "%2e%2e/outside"),
        *("sql\0", "\0/../../etc", "loop", "loop/sql", "file", "fifo", "fifo/sql", "none", "a" * 5000, "\ud800"),
    ],
)
def test_nothing_outside_the_root_is_opened(path: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", None)
    monkeypatch.setattr("builtins.open", None)
    for each in (path, str(root.parent / path) if path.startswith("..") else path):
        with pytest.raises(ConfigError, match=r"^PATH: "):
            folder_below(root, each)


@pytest.mark.parametrize("file", ADAPTER_FILES)
def test_a_file_that_leads_out_of_the_root_is_refused(file: str, root: Path) -> None:
    (root / "sql" / file).symlink_to(root / "deep" / file)
    assert folder_below(root, "sql") == root / "sql"
    (root / "sql" / file).unlink()
    (root / "sql" / file).symlink_to(root.parent / "outside" / file)
    for path in ("sql", "again"):
        with pytest.raises(ConfigError, match=f"PATH: a file of '{path}' is not below lora_root"):
            folder_below(root, path)


def test_without_a_root_nothing_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"there is no lora_root. Name .*--lora-root"):
        folder_below(None, "sql")


def test_what_is_kept_comes_back_and_other_models_stay(tmp_path: Path) -> None:
    file = tmp_path / "adapters.json"
    assert read_kept(file) == {}
    keep(file, "tiny", {"sql": "/r/sql"})
    keep(file, "other", {"law": "/r/law", "med": "/r/med"})
    keep(file, "tiny", {"sql": "/r/sql-2", "law-2": "/r/law"})
    assert read_kept(file) == {"tiny": {"sql": "/r/sql-2", "law-2": "/r/law"}, "other": {"law": "/r/law", "med": "/r/med"}}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    keep(file, "tiny", {})
    assert read_kept(file) == {"other": {"law": "/r/law", "med": "/r/med"}}
    assert [path.name for path in tmp_path.iterdir()] == ["adapters.json"]


def test_a_file_that_would_be_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "adapters.json"
    keep(file, "tiny", {"sql": "/r/sql"})
    monkeypatch.setattr(adapters, "MAX_KEPT_BYTES", 200)
    with pytest.raises(ConfigError, match=r"would have more than 200 bytes\. Unload"):
        keep(file, "tiny", {f"sql-{number}": "/r/sql" for number in range(10)})
    assert read_kept(file) == {"tiny": {"sql": "/r/sql"}}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"adapters": []}', '{"adapters": {"tiny": []}}', '{"adapters": {"tiny": {"sql": 1}}}', "[" * 100_000),
        *('{"adapters": {"tiny": {"../sql": "/r"}}}', '{"adapters": {"tiny": {"sql": "r"}}}', '{"models": {}}', "x" * (2 << 20)),
    ],
    ids=range(12),
)
def test_a_damaged_file_keeps_nothing_from_starting_and_is_written_anew(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = deployment(tmp_path)
    assert config.adapters_file is not None
    config.adapters_file.write_text(content)
    config.adapters_file.chmod(0o600)
    assert read_lists(config).loaded == {}
    assert "adapters loaded at run time are left out" in caplog.text
    keep(config.adapters_file, "tiny", {"sql": "/r/sql"})
    assert read_lists(config).loaded == {"tiny": {"sql": "/r/sql"}}


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    assert config.adapters_file is not None
    keep(config.adapters_file, "tiny", {"sql": "/r/sql"})
    config.adapters_file.chmod(0o666)
    assert read_lists(config).loaded == {}
    config.adapters_file.unlink()
    os.mkfifo(config.adapters_file, 0o600)
    assert read_lists(config).loaded == {}


def deployment(state: Path, root: Path | None = None, **adapters: str) -> FleetConfig:
    tiny = ModelSpec(name="tiny", folder=Path("none"), aliases=("small",), engine={"enable_lora": True}, adapters=adapters)
    other = replace(tiny, name="other", aliases=(), adapters={})
    plain = ModelSpec(name="plain", folder=Path("none"))
    gateway = {"state": str(state), "routes": {"chat": {"targets": [{"model": "tiny"}]}}}
    return FleetConfig(models=(tiny, other, plain), gateway=gateway, lora_root=None if root is None else str(root))


def test_the_file_wins_and_what_is_gone_is_left_out(tmp_path: Path, root: Path) -> None:
    config = deployment(tmp_path, root, law="/m/law").checked()
    assert config.adapters_file is not None
    sql = str(root / "sql")
    below = dict.fromkeys(("sql", "law", "small", "other", "chat"), sql)
    keep(config.adapters_file, "tiny", below | {"gone": str(root / "none"), "out": "/etc"})
    keep(config.adapters_file, "other", {"sql": sql, "med": sql})
    keep(config.adapters_file, "plain", {"plain-sql": sql})
    keep(config.adapters_file, "elsewhere", {"x": sql})
    lists = read_lists(config)
    assert [source.name for source in lists.sources("tiny")] == ["law", "sql"]
    assert [source.is_optional for source in lists.sources("tiny")] == [False, True]
    assert [source.is_optional for source in lists.sources("tiny", required="sql")] == [False, False]
    assert [source.name for source in lists.sources("other")] == ["med"]
    assert lists.sources("plain") == []
    assert {name: reason.partition(" (")[0] for (_, name), reason in lists.left_out.items() if name != "sql"} == {
        "law": "law is an adapter of tiny in the configuration",
        "small": "small is a model's name in the configuration: tiny",
        "other": "other is a model's name in the configuration: other",
        "chat": "chat is a route's name in the configuration",
        "gone": f"there is no folder {str(root / 'none')!r}",
        "out": "'/etc' is not below lora_root",
        "plain-sql": "plain has no adapters now",
    }
    assert lists.left_out["other", "sql"] == "sql is an adapter of tiny"
    assert len(lists.lines()) == 8


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(("a b", "is not a model name"), ("", "is not a model name"), ("../x", "is not a model name"), ("x" * 257, "is not a model name")),
        *(("tiny", "is a model's name"), ("small", "is a model's name"), ("law", "is an adapter of tiny in the conf"), ("med", "of other")),
    ],
)
def test_a_name_that_is_taken_is_not_loaded(name: str, word: str, tmp_path: Path, root: Path) -> None:
    config = deployment(tmp_path, root, law="/m/law")
    lists = AdapterLists({"tiny": {"law": "/m/law"}}, {"other": {"med": str(root / "sql")}})
    with pytest.raises(ConfigError, match=f"^NAME: .*{word}"):
        lists.with_loaded(config, "tiny", name, "sql")


@pytest.mark.parametrize("name", ["tiny", "small", "other", "a b"])
def test_an_adapter_of_the_file_needs_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is served twice|is not a model name"):
        deployment(tmp_path, None, **{name: "/m/x"}).checked()
