"""Tests the command line as people meet it: help at once, mistakes explained, exit codes kept."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from headrace.cli.exits import CODES, CommandExitCode, exit_code_of
from headrace.cli.flags.rows import SERVE_FLAGS
from headrace.cli.main import app
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure

SLOW_TO_IMPORT = {
    "torch",
    "transformers",
    "numba",
    "numpy",
    "aiohttp",
    "grpc",
    "uvicorn",
    "msgspec",
    "yaml",
    "rich",
    "psutil",
    "ssl",
    "pydantic",
}
COMMANDS = ("serve", "engine", "gateway", "chat", "models", "doctor", "replay", "bench", "config", "tls", "version")


def command_lines(command: object = None, words: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """`--help` of every command there is, hidden ones and groups included."""
    command = command or typer.main.get_command(app)
    yield [*words, "--help"]
    for name, inner in getattr(command, "commands", {}).items():
        yield from command_lines(inner, (*words, name))


@pytest.mark.process
def test_help_imports_nothing_that_is_slow() -> None:
    """In one interpreter: the imports of a command would be seen with it and with every later one."""
    arguments = [["--version"], *command_lines()]
    assert len(arguments) > len(COMMANDS) + 5
    code = f"""
import contextlib, io, json, sys
from headrace.cli.main import main
for arguments in {arguments!r}:
    sys.argv = ["headrace", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            main()
        except SystemExit as done:
            print(json.dumps([arguments, done.code, bool(shown.getvalue()), sorted(sys.modules)]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line[0] for line in lines] == arguments
    for words, status, is_shown, modules in lines:
        assert (status, is_shown) == (0, True), words
        assert not SLOW_TO_IMPORT & set(modules), words


def test_help_names_every_command_and_the_exit_codes(headrace: Headrace) -> None:
    done = headrace("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert "130 interrupted" in done.stdout


def test_version_is_the_packages(headrace: Headrace) -> None:
    from headrace import __version__

    assert headrace("--version").stdout == headrace("version").stdout == f"headrace {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["serv"], CommandExitCode.USAGE, "Did you mean 'serve'"),
        (["serve", "--max-modl-len", "5"], CommandExitCode.USAGE, "Did you mean --max-model-len?"),
        (["serve", "--no-enable-chunked-prefil"], CommandExitCode.USAGE, "Did you mean --no-enable-chunked-prefill?"),
        (["serve", "--tensor-paralel-size", "2"], CommandExitCode.USAGE, "Did you mean --tensor-parallel-size?"),
        (["serve", "--tokenizer-mod", "slow"], CommandExitCode.USAGE, "--tokenizer-mode: not supported. Only auto is accepted."),
        (["bench", "serve", "--num-promts", "2"], CommandExitCode.USAGE, "Did you mean --num-prompts?"),
        (["--versoin"], CommandExitCode.USAGE, "Did you mean --version?"),
        (["serve", "--xyzzy"], CommandExitCode.USAGE, "No such option: --xyzzy\n"),
        (["serve", "--max-model-len", "many"], CommandExitCode.USAGE, "--max-model-len"),
        (["serve", "--tensor-parallel-size", "two"], CommandExitCode.USAGE, "'two' is not a whole number"),
        (
            ["serve", "--device", "cuda", "-tp", "auto"],
            CommandExitCode.CONFIG,
            "-tp: auto may be more than 1: no layer is divided over GPUs. Use 1, or device = cpu.",
        ),
        (["serve", "-tp", "auto", "-pp", "2"], CommandExitCode.CONFIG, "-tp: auto is decided for one stage"),
        (["engine", "--listen", "unix:/run/e", "-tp", "auto"], CommandExitCode.CONFIG, "auto is for what starts all ranks of a replica"),
        (["serve", "-tp", "65"], CommandExitCode.CONFIG, "headrace: -tp: 65 is outside 1..64"),
        (
            ["serve", "--device", "cuda", "-tp", "2"],
            CommandExitCode.CONFIG,
            "-tp: 2 is more than 1: no layer is divided over GPUs.",
        ),
        (["serve", "-tp", "32", "-pp", "4"], CommandExitCode.CONFIG, "-tp: 32 x 4 (pipeline_parallel_size) are more than 64 processes."),
        (["serve", "a", "--model", "b"], CommandExitCode.USAGE, "give one of them"),
        (["serve", "/absent/folder"], CommandExitCode.CONFIG, "headrace: MODEL: there is no folder '/absent/folder'"),
        (["serve", "--model", "/absent/folder"], CommandExitCode.CONFIG, "headrace: --model: there is no folder '/absent/folder'"),
        (["serve", "--max-num-seqs", "0"], CommandExitCode.CONFIG, "headrace: --max-num-seqs: 0 is outside"),
        (["serve", "--gpu-memory-utilization", "3"], CommandExitCode.CONFIG, "headrace: --gpu-memory-utilization: 3.0 is outside"),
        (
            ["serve", "--quantization", "three", "-q", "four"],
            CommandExitCode.CONFIG,
            "headrace: -q: 'four' is not one of",
        ),
        (["serve", "--api-key", "short"], CommandExitCode.CONFIG, "headrace: --api-key: is shorter"),
        (
            ["serve", "--served-model-name", "a", "--served-model-name", "a"],
            CommandExitCode.CONFIG,
            "headrace: --served-model-name: 'a' is",
        ),
        (["serve", "--config", "/absent.yaml"], CommandExitCode.CONFIG, "/absent.yaml"),
        (["models", "/absent"], CommandExitCode.CONFIG, "no model folder"),
        (["replay", "/absent"], CommandExitCode.CONFIG, "cannot be read"),
        (["chat", "--url", "ftp://x"], CommandExitCode.SERVER, "not an http(s) URL"),
        ([], CommandExitCode.USAGE, "Usage: headrace"),
    ],
)
def test_mistakes_are_explained_with_the_right_exit_code(
    headrace: Headrace, arguments: list[str], code: CommandExitCode, what: str
) -> None:
    done = headrace(*arguments)
    assert done.returncode == code
    assert what in done.stderr + (done.stdout if not arguments else "")
    assert "Traceback" not in done.stderr


def test_a_key_from_the_environment_is_refused_under_its_variable(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "short")
    assert headrace("serve").stderr.startswith("headrace: HEADRACE_API_KEY: is shorter")


@pytest.mark.socket
def test_a_taken_port_is_refused_under_the_name_of_what_chose_it(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert headrace("serve", "--port", port).stderr.startswith(f"headrace: --port: port {port} on 127.0.0.1 is in use")
        monkeypatch.setenv("HEADRACE_GATEWAY__PORT", port)
        assert headrace("serve").stderr.startswith(f"headrace: HEADRACE_GATEWAY__PORT: port {port} on 127.0.0.1 is in use")


def test_every_error_of_ours_has_an_exit_code() -> None:
    errors: list[HeadraceError] = [ConfigError("a", "b"), CheckpointError("a", "b"), InvalidRequest("a", "b"), HeadraceError("x")]
    assert [exit_code_of(error) for error in errors] == [
        CommandExitCode.CONFIG,
        CommandExitCode.CONFIG,
        CommandExitCode.USAGE,
        CommandExitCode.FAILED,
    ]
    assert all(code is not CommandExitCode.OK for _, code in CODES)


def test_completion_script_is_offered(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    # Asked for the way a shell's start-up file does it; --show-completion looks at the parent process, which under make is sh.
    monkeypatch.setenv("_HEADRACE_COMPLETE", "source_zsh")
    done = headrace()
    assert done.returncode == 0
    assert "_HEADRACE_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("serve", "--api-key", "--enable-prefix-caching"),
            "--api-key: a value is missing. If --enable-prefix-caching is the value, write ",
        ),
        (("serve", "--api_key", "--disable-log-requests", "m"), "--api-key: a value is missing. If --disable-log-requests is the value, "),
        (("serve", "m", "--host", "--"), "--host: a value is missing.\n"),
        (("bench", "serve", "--model"), "--model: a value is missing.\n"),
    ],
)
def test_a_flag_is_never_the_value_of_the_flag_before_it(headrace: Headrace, words: tuple[str, ...], said: str) -> None:
    """`serve --api-key --enable-prefix-caching` served with the key "--enable-prefix-caching"."""
    done = headrace(*words)
    assert done.returncode == CommandExitCode.USAGE
    assert done.stderr.startswith(f"headrace: {said}")


@pytest.mark.parametrize("command", ["serve", "throughput"])
@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_benchmark_of_no_prompt_is_refused(headrace: Headrace, command: str, count: str) -> None:
    done = headrace("bench", command, "--num-prompts", count)
    assert done.returncode == CommandExitCode.USAGE
    assert f"'--num-prompts': {count} is not in the range" in done.stderr


def test_output_that_cannot_be_written_is_refused_before_the_run(headrace: Headrace, tmp_path: Path) -> None:
    """The server is not asked: nothing listens there, which would be exit code 4."""
    for file, reason in ((tmp_path / "absent" / "out.json", "there is no folder"), (tmp_path, "is a folder")):
        done = headrace("bench", "serve", "--url", "http://127.0.0.1:9", "--output-json", str(file))
        assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_shows_the_common_options_in_groups_and_help_all_the_others_too(headrace: Headrace) -> None:
    shown, every = headrace("serve", "--help").stdout, headrace("serve", "--help-all").stdout
    assert [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        *("Arguments:", "Model:", "Engine:", "Network:", "Security:", "Operation:", "Options:")
    ]
    for flag in SERVE_FLAGS:
        for name in [word for word in "/".join(flag.names).split("/") if word.startswith("--")]:
            assert (name in shown.replace(",", " ").split()) is flag.option.is_common, name
            assert name in every.replace(",", " ").split(), name
    assert 20 <= sum(flag.option.is_common for flag in SERVE_FLAGS) <= 30
