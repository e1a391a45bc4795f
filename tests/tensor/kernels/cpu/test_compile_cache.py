"""Tests that compiled kernels, which are pickled machine code, are kept in a folder that is ours alone, or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("numba")

from headrace.tensor.host.cache_folder import cache_root, open_private
from headrace.tensor.kernels.cpu.jit.compile_cache import choose_cache, code_key

pytestmark = pytest.mark.pure


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        chosen = choose_cache(tmp_path / "cache", "key")
    finally:
        os.umask(previous)
    assert chosen.directory == tmp_path / "cache" / "numba" / "key"
    for path in (chosen.directory, chosen.directory.parent, tmp_path / "cache"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert str(chosen.directory) in chosen.reason


def test_an_existing_folder_that_others_may_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "numba" / "key"
    folder.mkdir(parents=True, mode=0o755)
    tmp_path.chmod(0o700)
    open_private(tmp_path, ("numba", "key"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, depth: int, mode: int) -> None:
    root = tmp_path / "cache"
    (root / "numba" / "key").mkdir(parents=True)
    chain = [root, root / "numba", root / "numba" / "key"]
    for path in chain:
        path.chmod(0o700)
    chain[depth].chmod(mode)
    chosen = choose_cache(root, "key")
    assert chosen.directory is None
    assert f"{chain[depth]} may be written by others (mode {mode:04o})" in chosen.reason
    assert "HEADRACE_CACHE_DIR" in chosen.reason


def test_a_link_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    root.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    (root / "numba").symlink_to(elsewhere)
    chosen = choose_cache(root, "key")
    assert chosen.directory is None
    assert "a link" in chosen.reason


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    chosen = choose_cache(tmp_path / "cache", "key")
    assert chosen.directory is None
    assert f"belongs to user {owner}" in chosen.reason


def test_a_place_that_cannot_hold_folders_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert choose_cache(file / "cache", "key").directory is None


def test_the_key_changes_with_sources_and_cpu(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    key = code_key(tmp_path, "skylake +avx")
    assert key.startswith("skylake-")
    assert code_key(tmp_path, "skylake +avx") == key
    assert code_key(tmp_path, "skylake +avx2") != key
    (tmp_path / "b.py").write_text("")
    assert code_key(tmp_path, "skylake +avx") != key


def test_where_the_cache_is() -> None:
    assert cache_root({"HEADRACE_CACHE_DIR": "/a"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_root({"XDG_CACHE_HOME": "b"}) == Path.home() / ".cache/headrace"
    assert cache_root({}) == Path.home() / ".cache" / "headrace"
