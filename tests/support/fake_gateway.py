"""A gateway process of tests: the supervisor's file, leash and signals, and one long request instead of HTTP.

`work` in its file says what to do: "idle", "die" (before it serves), or "stream", which sends one request of `num_tokens` tokens to the
first replica, says so in `gateway.out` beside its file, finishes it before it leaves on SIGTERM, and writes the tokens there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from headrace.wire.leash import Leash
from headrace.wire.stop_signals import StopSignals


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
    if config["work"] == "die":
        print("the gateway's last words", file=sys.stderr)
        sys.exit(9)
    asyncio.run(serve(config, Path(config["out"]), leash))


if __name__ == "__main__":
    main()
