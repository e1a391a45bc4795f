"""Tests the cache folder of a user without a home."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from headrace.machine.cache_folder import cache_root, open_private

pytestmark = pytest.mark.pure


def test_a_user_without_a_home_has_a_private_folder_in_the_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was a folder "~" of the working directory."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = cache_root({})
    assert root == tmp_path / f"headrace-cache-{os.geteuid()}"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="may be written by others"):
        open_private(root, ("packed",))  # made by another user before
