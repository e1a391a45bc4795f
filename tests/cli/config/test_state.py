"""Tests that every command finds the same state folder, and that it is closed to other users."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from headrace.cli.config.load import load
from headrace.cli.config.state import make_state_folder, state_folder
from headrace.cli.flags.flag import GivenFlags
from headrace.core.errors import ConfigError

pytestmark = pytest.mark.pure


def test_what_is_given_wins_over_the_users_own_folder(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    assert state_folder("/var/state", environment) == Path("/var/state")
    assert state_folder("state", environment) == Path.cwd() / "state"
    assert state_folder("", environment) == tmp_path / "headrace"


@pytest.mark.parametrize("environment", [{}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}])
def test_without_a_usable_standard_folder_it_is_in_the_home(environment: dict[str, str]) -> None:
    assert state_folder("", environment) == Path.home() / ".local/state/headrace"


def test_a_user_without_a_home_names_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user need not be in /etc/passwd. The keys went into a folder "~" of the working directory."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"state: this user has no home folder.*--state DIR, or HEADRACE_STATE"):
        make_state_folder(state_folder("", {}))
    make_state_folder(state_folder("own", {}))
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize("given", ["~no-such-user-here/state", "~"])
def test_a_tilde_of_nobody_is_a_name_like_others(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert state_folder(given, {}) == Path.cwd() / given


def test_flag_variable_and_file_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("state: of-the-file\nmodels: [{upstreams: [{url: http://h/v1}], name: far}]\n")
    own = {"XDG_STATE_HOME": str(tmp_path)}
    assert load(file, own).state == str(Path.cwd() / "of-the-file")
    assert load(file, {**own, "HEADRACE_STATE": "/of/the/variable"}).state == "/of/the/variable"
    assert load(file, {"HEADRACE_STATE": "/of/the/variable"}, GivenFlags({"state": "/of/the/flag"})).state == "/of/the/flag"
    file.write_text(file.read_text().replace("state: of-the-file", ""))
    config = load(file, own)
    assert config.state == str(tmp_path / "headrace")
    assert config.fleet(Path).gateway["state"] == config.state, "the gateways have the same one"


def test_it_is_made_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    make_state_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    make_state_folder(folder)


def test_a_folder_that_other_users_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"state: .* may be written by other users.*chmod 700"):
        make_state_folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state: .*file cannot be made"):
        make_state_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are root's to make")
def test_root_leaves_no_files_in_the_folder_of_a_service(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345.*Run this command as that user"):
        make_state_folder(tmp_path)
