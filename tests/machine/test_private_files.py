"""Tests files of secrets: closed to other users, unless root has opened them to a group of ours."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.machine.private_files import check_private_file, check_socket_folder, is_open_to_others, why_not_private

pytestmark = pytest.mark.pure

OURS, THEIRS = 4242, 4343


@dataclass(frozen=True)
class FileFacts:
    st_uid: int
    st_gid: int
    st_mode: int


@pytest.mark.parametrize(
    ("owner", "group", "mode", "is_open"),
    [
        (0, OURS, 0o440, False),  # a Kubernetes secret of a pod with fsGroup
        (0, OURS, 0o640, False),
        (0, OURS, 0o660, True),
        (0, OURS, 0o450, True),
        (0, OURS, 0o444, True),
        (0, THEIRS, 0o440, True),
        (0, 0, 0o440, True),
        (1000, OURS, 0o440, True),
        (1000, THEIRS, 0o600, False),
        (0, THEIRS, 0o400, False),
    ],
)
def test_root_may_open_a_file_to_a_group_of_this_process(
    owner: int, group: int, mode: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [OURS])
    monkeypatch.setattr(os, "getegid", lambda: 0)
    assert is_open_to_others(FileFacts(owner, group, stat.S_IFREG | mode)) == is_open  # type: ignore[arg-type]


def test_a_file_is_refused_or_only_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=r"where: .*key is open to other users \(mode 0604\)"):
        check_private_file("where", str(path))
    assert "mode 0604" in why_not_private("where", str(path))
    path.chmod(0o600)
    check_private_file("where", str(path))
    assert why_not_private("where", str(path)) == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        why_not_private("where", str(tmp_path / "none"))


def test_a_socket_in_an_open_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_socket_folder("rendezvous", tmp_path / "e.sock")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"rendezvous: .*0700"):
        check_socket_folder("rendezvous", tmp_path / "e.sock")
