"""Holds the fixtures that the command tests share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.cli.main import main


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder that passes for a model folder where only config.json is looked for."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Headrace = Callable[..., Done]


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Headrace:
    """The command in this process: an interpreter of its own for each call would cost a second. text: comes in through a pipe"""

    def run(*arguments: str, text: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capfd.readouterr())

    return run
