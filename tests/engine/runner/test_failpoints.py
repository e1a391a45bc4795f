"""Failpoints fire exactly where, when and as often as a test says, and never otherwise."""

from __future__ import annotations

import failpoint_kit
import pytest
from failpoint_kit import Injected, armed, sites

from headrace.engine.failpoints import failpoint

pytestmark = pytest.mark.pure


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that exists for this test alone."""
    monkeypatch.setattr(failpoint_kit, "sites", lambda: ("test.here",))
    return "test.here"


def test_unarmed_failpoint_does_nothing(site: str) -> None:
    failpoint(site)


def test_armed_failpoint_raises_once_and_is_disarmed_after(site: str) -> None:
    with armed(site) as fault:
        with pytest.raises(Injected, match=r"test\.here"):
            failpoint(site)
        failpoint(site)
    failpoint(site)
    assert (fault.hits, fault.passed) == (1, 1)


def test_skip_and_times_choose_the_calls_that_fail(site: str) -> None:
    outcomes = []
    with armed(site, lambda: MemoryError("no room"), skip=2, times=2):
        for _ in range(6):
            try:
                failpoint(site)
                outcomes.append("ok")
            except MemoryError:
                outcomes.append("raised")
    assert outcomes == ["ok", "ok", "raised", "raised", "ok", "ok"]


def test_neighbouring_names_are_not_touched(site: str) -> None:
    with armed(site) as fault:
        failpoint("test.elsewhere")
    assert fault.hits == 0


def test_a_name_in_no_source_file_cannot_be_armed() -> None:
    with pytest.raises(ValueError, match="no failpoint"), armed("runner.no_such_place"):
        pass


def test_sites_are_read_from_the_source() -> None:
    found = sites()
    assert "runner.forward" in found
    assert found == tuple(sorted(set(found)))
