"""The command line as people meet it: help at once, mistakes explained, exit codes kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from headrace.cli.exits import CODES, ExitCode, exit_code_of
from headrace.cli.main import main
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest

SLOW_TO_IMPORT = ("torch", "transformers", "numba", "numpy", "aiohttp", "grpc", "uvicorn", "msgspec", "yaml", "rich", "psutil", "ssl")
COMMANDS = ("serve", "chat", "models", "doctor", "replay", "bench", "config", "version")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Headrace = Callable[..., Done]


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Headrace:
    """The command in this process: an interpreter of its own for each mistake would cost a second."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capfd.readouterr())

    return run


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "serve", "--help"], ["--version"]])
def test_help_imports_nothing_that_is_slow(arguments: list[str]) -> None:
    code = (
        f"import sys, json; sys.argv = ['headrace', *{arguments!r}]\nfrom headrace.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    print('\\n' + json.dumps([done.code, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status in (0, None)
    assert not set(SLOW_TO_IMPORT) & set(modules)


def test_help_names_every_command_and_the_exit_codes(headrace: Headrace) -> None:
    done = headrace("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert "\n  engine " not in done.stdout
    assert "130 interrupted" in done.stdout


def test_version_is_the_packages(headrace: Headrace) -> None:
    from headrace import __version__

    assert headrace("--version").stdout == headrace("version").stdout == f"headrace {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["serv"], ExitCode.USAGE, "Did you mean 'serve'"),
        (["serve", "--max-modl-len", "5"], ExitCode.USAGE, "--max-model-len"),
        (["serve", "--max-model-len", "many"], ExitCode.USAGE, "--max-model-len"),
        (["serve", "--tensor-parallel-size", "2"], ExitCode.USAGE, "--replicas"),
        (["serve", "a", "--model", "b"], ExitCode.USAGE, "give one of them"),
        (["serve", "/absent/folder"], ExitCode.CONFIG, "models[0].engine.model"),
        (["serve", "--config", "/absent.yaml"], ExitCode.CONFIG, "/absent.yaml"),
        (["models", "/absent"], ExitCode.CONFIG, "no model folder"),
        (["replay", "/absent"], ExitCode.CONFIG, "cannot be read"),
        (["chat", "--url", "ftp://x"], ExitCode.SERVER, "not an http(s) URL"),
        ([], ExitCode.USAGE, "Usage: headrace"),
    ],
)
def test_mistakes_are_explained_with_the_right_exit_code(headrace: Headrace, arguments: list[str], code: ExitCode, what: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == code
    assert what in done.stderr + (done.stdout if not arguments else "")
    assert "Traceback" not in done.stderr


def test_every_error_of_ours_has_an_exit_code() -> None:
    errors: list[HeadraceError] = [ConfigError("a", "b"), CheckpointError("a", "b"), InvalidRequest("a", "b"), HeadraceError("x")]
    assert [exit_code_of(error) for error in errors] == [ExitCode.CONFIG, ExitCode.CONFIG, ExitCode.USAGE, ExitCode.FAILED]
    assert all(code is not ExitCode.OK for _, code in CODES)


def test_completion_script_is_offered(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked for the way a shell's start-up file does it; --show-completion looks at the parent process, which under make is sh.
    monkeypatch.setenv("_HEADRACE_COMPLETE", "source_bash")
    done = headrace()
    assert done.returncode == 0
    assert "_HEADRACE_COMPLETE" in done.stdout
