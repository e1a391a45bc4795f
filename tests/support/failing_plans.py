"""Makes plans raise while they are half made, beside the steps that fail, so that state machines let both happen in one life."""

from __future__ import annotations

from typing import Any

from headrace.policy.schedule.scheduler import Scheduler
from headrace.policy.step_builder import StepBuilder

SITES = ("_plan_decodes", "_plan_prefills", "_plan_row", "_extend_bulk_decode", "_try_start", "_start", "_add_row", "charge")
"""Methods of the planner that a plan calls, some of them for each of its rows."""


def fail_next_plan(scheduler: Scheduler, site: str, after: int) -> None:
    """The next plan raises when it calls `site` again after `after` calls, if it comes to that. Plans after it do not."""
    planner: Any = scheduler._planner
    if "fill" in vars(planner):
        return  # one is to fail already
    fill, method, calls = planner.fill, getattr(planner, site), 0

    def raising(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("a plan that fails once")
        return method(*args)

    def fill_and_fail(step: StepBuilder) -> None:
        del planner.fill
        setattr(planner, site, raising)
        try:
            fill(step)
        finally:
            delattr(planner, site)

    planner.fill = fill_and_fail
