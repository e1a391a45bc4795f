"""Tests turning a model's name into a folder, without looking anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from headrace.bundled import FOLDER, bundled_path
from headrace.core.errors import ConfigError
from headrace.fleet.weights import ALLOWED_FILES, resolve_adapter, resolve_model

pytestmark = pytest.mark.pure


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    root = tmp_path / "bundled"
    for name in ("tiny", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("{}")
    return root


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that cannot be reached; the calls it was asked."""
    calls: list[dict[str, Any]] = []

    def fail(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    return calls


def test_a_bundled_name_and_a_local_folder_need_no_network(bundled: Path, tmp_path: Path, no_hub: list[dict[str, Any]]) -> None:
    assert resolve_model("tiny", bundled=bundled) == bundled / "tiny"
    assert resolve_model(str(tmp_path / "secret"), bundled=bundled) == tmp_path / "secret"
    assert no_hub == []


def test_an_adapter_is_bundled_or_a_folder(tmp_path: Path) -> None:
    assert resolve_adapter("pirate") == FOLDER / "adapters" / "pirate"
    assert resolve_adapter(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name in ("", "../adapters/pirate", "pirate/", "some/hub-id", "pirate\0", str(tmp_path / "file")):
        with pytest.raises(ConfigError, match="there is no folder"):
            resolve_adapter(name)


def test_a_bundled_name_never_leaves_its_folder(bundled: Path) -> None:
    for name in ("../secret", "..", ".", "tiny/../../secret", "/etc", "tiny\0", "", "TINY", "tiny/"):
        assert bundled_path(name, bundled) is None


@pytest.mark.parametrize(
    "name", ["./none", "/no/such/folder", "../none", "a/../b", "a/b/c", "~/none-at-all", "has space", "tab\t", "\u212a"]
)
def test_what_can_only_be_a_path_never_reaches_the_hub(bundled: Path, no_hub: list[dict[str, Any]], name: str) -> None:
    with pytest.raises(ConfigError, match="Bundled: other, tiny"):
        resolve_model(name, bundled=bundled)
    assert no_hub == []


def test_a_file_and_an_empty_name_are_refused(bundled: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(file), bundled=bundled)
    for name in ("", "a\0b"):
        with pytest.raises(ConfigError, match="not a name"):
            resolve_model(name, bundled=bundled)


def test_a_hub_id_offline_says_what_to_do_and_asks_for_safe_files_only(bundled: Path, no_hub: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        resolve_model("some-org/some-model", experimental=True, bundled=bundled)
    [call] = no_hub
    assert call["name"] == "some-org/some-model"
    assert call["allow_patterns"] == list(ALLOWED_FILES)
    assert not any(pattern.endswith((".bin", ".py", ".pt", ".pkl", "*")) for pattern in call["allow_patterns"])


def test_a_hub_snapshot_is_the_folder_it_was_put_in(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "snapshot"))
    assert resolve_model("some-org/some-model", experimental=True, bundled=bundled) == tmp_path / "snapshot"
