"""Tests that the number of connections fits the open files, and that too few files are refused at start."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.gateway.http.config import MAX_REFUSALS, MIN_CONNECTIONS, ConnectionLimit, Limits, connection_limit, divide
from headrace.machine.resources import num_open_files, raise_open_files_limit

pytestmark = pytest.mark.pure


def test_with_descriptors_enough_the_configured_limit_holds() -> None:
    assert divide(16_384, 60, 1 << 20) == ConnectionLimit(16_384, 64)
    assert divide(2, 60, 1024) == ConnectionLimit(2, 64)


def test_fewer_descriptors_are_fewer_connections() -> None:
    assert divide(16_384, 60, 1024) == ConnectionLimit(1024 - 60 - 64, 64)


@given(most=st.integers(0, 3000), taken=st.integers(0, 500) | st.integers(0, 100_000), wanted=st.integers(1, 5000))
@example(most=20_000, taken=19_999, wanted=16_384)
def test_what_is_served_and_refused_fits_what_may_be_open(most: int, taken: int, wanted: int) -> None:
    free, least = most - taken, min(wanted, MIN_CONNECTIONS)
    if free < least + max(2, min(MAX_REFUSALS, free // 8)):
        with pytest.raises(ConfigError, match=rf"a process may have {most} .ulimit -n") as refused:
            divide(wanted, taken, most)
        named = int(re.findall(r"ulimit -n (\d+)", refused.value.remedy)[0])
        assert named > most
        assert divide(wanted, taken, named).max_connections >= least
        return
    limit = divide(wanted, taken, most)
    assert limit.max_refusals >= 2
    assert least <= limit.max_connections <= wanted
    assert taken + limit.max_connections + limit.max_refusals <= most


def test_the_soft_limit_is_raised_as_far_as_it_may_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_open_files_limit(128) == 256
        assert raise_open_files_limit(512) == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, hard)
        assert raise_open_files_limit(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_connections_are_held_whatever_few_requests_may_run() -> None:
    assert [Limits(max_requests=number).max_connections for number in (1, 4096, 10_000)] == [16_384, 16_384, 20_000]


def test_text_workers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a socket for as long as the gateway runs."""
    monkeypatch.setattr("headrace.gateway.http.config.raise_open_files_limit", lambda _: 4096)
    none, many = (connection_limit(16_384, 0, num_text_workers=number).max_connections for number in (0, 80))
    assert none - many == 80


def test_open_descriptors_are_counted() -> None:
    before = num_open_files()
    ends = os.pipe()
    try:
        assert num_open_files() == before + 2
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("limit", [20, 64])
@pytest.mark.process
def test_serve_refuses_too_few_open_files_in_one_sentence(limit: int) -> None:
    """With 20 the gateway was started for ever: gRPC ends the process that has no descriptor for it. With 64 the gateway refuses, not
    this process, which has fewer files open: both said it, and the text workers' host ended with a traceback beside them."""
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}));"
        "sys.argv = ['headrace', 'serve', '--port', '0']; from headrace.cli.main import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    (line,) = ended.stderr.splitlines()
    assert re.match(rf"headrace: (gateway: )?open files: a process may have {limit} .ulimit -n.", line)
    assert line.endswith("Raise the limit: ulimit -n 4096, or LimitNOFILE= of the service.")
