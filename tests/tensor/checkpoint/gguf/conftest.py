"""Gives every test folders of GGUF files of its own. Compiled kernels stay in the common cache: compiling them takes ten seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tensor.checkpoint.gguf import folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setattr(folder, "cache_root", lambda environ: root)
    return root
