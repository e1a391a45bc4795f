"""Plays a gateway process: it has the supervisor's file, leash and signals, and one long request instead of HTTP.

When it is asked over its leash, it says that a replica is ready if the replica's socket can be connected to, and has no request open there.

`work` in its file is "idle" or "stream". With "stream" it sends one request of `num_tokens` tokens to the first replica, and says so in
`gateway.out` beside its file. It finishes the request before it leaves on SIGTERM, and writes the tokens to that file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from headrace.machine.signals import StopSignals
from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind, ModelStatus, ReplicaStatus


class Answers:
    def __init__(self, path: Path, leash: Leash) -> None:
        self._path = path
        self._leash = leash
        self._listed: dict[str, dict[str, str]] = {}
        self._reload()

    def take(self, request: LeashRequest) -> None:
        if request.kind is LeashRequestKind.STATUS:
            seen = {model: ModelStatus({name: status(at) for name, at in listed.items()}) for model, listed in self._listed.items()}
            self._leash.status(request, seen)
        else:
            self._reload()
            self._leash.reloaded(request)

    def _reload(self) -> None:
        config = json.loads(self._path.read_text())
        self._listed = {model["name"]: {each["name"]: each["address"] for each in model["replicas"]} for model in config["models"]}


def status(address: str) -> ReplicaStatus:
    return ReplicaStatus(True, "", 0) if can_connect(address) else ReplicaStatus(False, "waiting", 0)


def can_connect(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True


async def serve(config: dict[str, Any], out: Path, leash: Leash) -> None:
    stop = StopSignals()
    if config["work"] == "idle":
        leash.ready({"host": "nowhere", "port": config["port"]})
        await stop.soft
        return
    # Only here: an idle gateway should start at once.
    from patience import PATIENCE_S
    from wire_kit import read_all, request

    from headrace.wire.client import ReplicaClient

    async with ReplicaClient(config["models"][0]["replicas"][0]["address"]) as replica:
        await replica.wait_connected(PATIENCE_S)
        stream = replica.submit(request("r", max_tokens=config["num_tokens"]))
        first = await stream.__anext__()
        leash.ready({"host": "nowhere", "port": config["port"]})
        await stop.soft
        rest = await read_all(stream)
        out.write_text(json.dumps([*first.token_ids, *rest[0]]))  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--worker", type=int)
    given = parser.parse_args()
    config = json.loads(given.config.read_text())
    leash = Leash(given.parent_fd)
    leash.watch()
    leash.listen(Answers(given.config, leash).take)
    asyncio.run(serve(config, Path(config["out"]), leash))


if __name__ == "__main__":
    main()
