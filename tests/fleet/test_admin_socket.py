"""Tests the admin socket of a running deployment: who may ask, and how a command goes on when its client leaves. Processes are scripted."""

from __future__ import annotations

import asyncio
import stat

import pytest
from scripted_site import scripted_site

from headrace.cli.admin.client import AdminClient, find_deployment
from headrace.cli.exits import ServerFailed

pytestmark = pytest.mark.socket


async def test_the_socket_is_its_users_alone_and_wants_the_token() -> None:
    async with scripted_site() as site:
        folder = site.run_dir
        for name in ("admin.sock", "admin.token"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert find_deployment(folder.parent) == find_deployment(folder) == folder
        (folder / "admin.token").write_text("another")
        with pytest.raises(ServerFailed, match="answered 401"):
            await asyncio.to_thread(AdminClient(folder).status)
    with pytest.raises(ServerFailed, match="no deployment"):
        find_deployment(folder.parent)


async def test_a_command_goes_on_when_its_client_leaves() -> None:
    async with scripted_site(models={"tiny": 2}) as site:
        await site.all_serving()
        lines = AdminClient(site.run_dir).command("rollout", {})
        assert (await asyncio.to_thread(next, lines))["event"] == "progress"
        await asyncio.to_thread(lines.close)  # type: ignore[attr-defined]  # a generator
        async with asyncio.timeout(60):
            while await site.phases() != {"tiny-2": "serving", "tiny-3": "serving"}:
                await asyncio.sleep(0.02)


async def test_what_a_command_says_comes_a_line_at_a_time_and_a_fault_by_name() -> None:
    async with scripted_site() as site:
        said = await site.do("scale", model="tiny", replicas=2)
        assert [line.get("text", line["event"]) for line in said] == ["tiny-1 is starting", "tiny-1 serves", "done"]
        [refused] = await site.do("rollout", modle="tiny")
        assert (refused["event"], "modle" in refused["reason"]) == ("refused", True)
