"""Tests that a start that compiles logs its progress, and that a start that finds everything compiled logs nothing of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.engine.runner.warmup import LOG_INTERVAL_S, CompileNotice, log_compiling
from headrace.tensor.backends import load_backend

pytestmark = pytest.mark.pure

STARTS = """
import logging, sys
from headrace.engine.config import EngineConfig
from headrace.engine.runner.build import build_runner
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
build_runner(EngineConfig(model=sys.argv[1], num_kv_blocks=50, max_model_len=64).checked())[0].close()
"""


EXPECTED = 115


def said(caplog: pytest.LogCaptureFixture, times: list[float], expected: int | None = EXPECTED) -> list[str]:
    """What is logged when a function has been compiled at each of `times`."""
    clock = iter([times[0], *times, times[-1]])
    notice = CompileNotice("kept in /cache", expected, lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for number in range(len(times) + 1):
            notice(number)
        notice.end()
    return [record.getMessage() for record in caplog.records]


def test_people_hear_at_once_that_it_compiles_and_rarely_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    found = said(caplog, [0.5 * number for number in range(1, 25)])
    assert found == [
        f"compiling about {EXPECTED} kernels, which takes about half a minute: kept in /cache",
        f"compiled 11 of about {EXPECTED} kernels in {LOG_INTERVAL_S:.0f} s",
        f"compiled 21 of about {EXPECTED} kernels in {2 * LOG_INTERVAL_S:.0f} s",
        "compiled 24 kernels in 12 s",
    ]


def test_a_number_that_depends_on_the_model_is_not_said_before_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, [0.5, 6.0, 7.0], None) == [
        "compiling kernels, which takes about half a minute: kept in /cache",
        "compiled 2 kernels in 6 s",
        "compiled 3 kernels in 6 s",
    ]


def test_more_than_expected_is_not_more_than_all(caplog: pytest.LogCaptureFixture) -> None:
    found = said(caplog, [LOG_INTERVAL_S * number for number in range(EXPECTED + 3)])
    assert found[-2].startswith(f"compiled {EXPECTED + 3} of about {EXPECTED + 3} ")
    assert found[-1].startswith(f"compiled {EXPECTED + 3} kernels ")


def test_nothing_is_said_where_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        CompileNotice("kept in /cache").end()
        for backend in (load_backend("reference"), load_backend("numba")):
            with log_compiling(backend.compiler):
                pass
    assert not caplog.records


def test_what_numba_compiles_is_counted_once_and_what_it_loads_is_not(caplog: pytest.LogCaptureFixture) -> None:
    numba = pytest.importorskip("numba")
    from headrace.tensor.kernels.cpu.jit.launch import compile_kernel

    @numba.njit  # type: ignore[untyped-decorator]
    def inner(value: int) -> int:
        return value + 1

    def kernel(arguments: int, worker: int, workers: int) -> None:
        inner(arguments)

    compile_kernel(_empty)  # the region that all kernels share is there from now on
    caplog.clear()
    with caplog.at_level(logging.INFO), log_compiling(load_backend("numba").compiler):
        numba.njit(lambda value: value * 3)(2)
        numba.cfunc("void(intp, intp, intp)")(_empty)
        inner(1)
        inner(2)
    assert [record.getMessage().split(" in ")[0] for record in caplog.records][1:] == ["compiled 2 kernels"]


def _empty(arguments: int, worker: int, workers: int) -> None:
    pass


@pytest.mark.slow
@pytest.mark.process
def test_a_start_compiles_about_as_many_as_it_says_and_the_next_one_none(tmp_path: Path) -> None:
    environment = {**os.environ, "HEADRACE_CACHE_DIR": str(tmp_path / "cache"), "HEADRACE_KEEP_PACKED": "0"}
    folder = bundled_path(DEFAULT_MODEL)
    if folder is None:
        pytest.skip("the bundled model is not there: smaller ones need fewer kernels")
    command = [sys.executable, "-c", STARTS, str(folder)]
    first, second = (subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2))
    [last] = [line for line in first.splitlines() if line.startswith("compiled ") and " of about " not in line]
    compiler = load_backend("numba").compiler
    assert compiler is not None
    assert compiler.expected is not None
    assert abs(int(last.split()[1]) - compiler.expected) <= compiler.expected / 5, f"change what is expected: {last}"
    assert first.index("loading ") < first.index("compiling about ") < first.index(last)
    assert "once per machine and version, compiled kernels are kept in " in first
    assert "loaded " in second
    assert "compil" not in second
