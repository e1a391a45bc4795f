"""A gateway process of tests: the supervisor's file, leash and signals, and one long request instead of HTTP.

Asked over its leash it says that a replica is ready when its socket can be connected to, and has as many open requests there as
`open.json` beside `gateway.out` says; it refuses a file with `refuse` in it, and finds no
replica of `blind` ready.

`work` in its file says what to do: "idle", "die" (before it serves), or "stream", which sends one request of `num_tokens` tokens to the
first replica, says so in `gateway.out` beside its file, finishes it before it leaves on SIGTERM, and writes the tokens there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

from headrace.wire.leash import Leash, LeashRequest, LeashRequestKind, ReplicaStatus
from headrace.wire.stop_signals import StopSignals


class Answers:
    """What is asked over the leash, answered in its thread. A replica that the file lists no more stays while it has open requests."""

    def __init__(self, path: Path, leash: Leash) -> None:
        self._path = path
        self._leash = leash
        self._listed: dict[str, dict[str, str]] = {}
        self._reload()

    def take(self, request: LeashRequest) -> None:
        if request.kind is LeashRequestKind.STATUS:
            statuses = {
                model: {
                    name: ReplicaStatus(not (reason := self._why_not_ready(name, address)), reason, self._num_open(name))
                    for name, address in replicas.items()
                }
                for model, replicas in self._listed.items()
            }
            self._leash.status(request, statuses)
        elif reason := self._reload():
            self._leash.refused(request, reason)
        else:
            self._leash.reloaded(request)

    def _reload(self) -> str:
        config = json.loads(self._path.read_text())
        if "refuse" not in config:
            listed = {m["name"]: {r["name"]: r["address"] for r in m.get("replicas", ())} for m in config["models"]}
            for model, replicas in self._listed.items():
                listed.setdefault(model, {}).update({name: at for name, at in replicas.items() if self._num_open(name)})
            self._listed = listed
        return str(config.get("refuse", ""))

    def _why_not_ready(self, name: str, address: str) -> str:
        if name in json.loads(self._path.read_text()).get("blind", ()):
            return "another tokenizer"
        return "" if can_connect(address) else "waiting"

    def _num_open(self, replica: str) -> int:
        path = Path(json.loads(self._path.read_text())["out"]).with_name("open.json")
        return int(json.loads(path.read_text()).get(replica, 0)) if path.exists() else 0


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
    from wire_kit import PATIENCE_S, read_all, request

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
    if config["work"] == "die":
        print("the gateway's last words", file=sys.stderr)
        sys.exit(9)
    asyncio.run(serve(config, Path(config["out"]), leash))


if __name__ == "__main__":
    main()
