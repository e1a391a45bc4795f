"""Tests tasks that run beside their owner, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.tasks import RunningTasks, end_tasks

pytestmark = pytest.mark.loop


async def test_a_task_leaves_the_set_as_it_ends() -> None:
    running = RunningTasks()
    first, second = running.start(asyncio.sleep(1.0, "one"), "first"), running.start(asyncio.sleep(2.0, "two"), "second")
    assert await first == "one"
    assert running == {second}
    assert await second == "two"
    assert not running


async def test_tasks_have_ended_once_they_were_ended_whatever_they_do_meanwhile() -> None:
    running, ended = RunningTasks(), []

    async def ends_late() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(3.0)
            ended.append("late")
            raise ValueError("at its end")

    running.start(ends_late(), "late")
    running.start(asyncio.sleep(60.0), "at once")
    await asyncio.sleep(1.0)
    await end_tasks(running)
    assert ended == ["late"]
    assert not running
