"""A supervisor process of tests: fake engines and a fake gateway under the real one. Arguments: a JSON file; events go to stdout.

{"replicas": 2, "run_dir": "/tmp/x", "drain_timeout_s": 5, "gateway": {"work": "idle"}, "fake": {"step_seconds": 0.01}}
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.supervisor import FleetReady, Supervisor
from headrace.observe.logs import LogFormat, set_up_logging

SUPPORT = Path(__file__).resolve().parent


def fleet_config(given: dict[str, Any]) -> FleetConfig:
    """The fake engine's options travel in a file of their own: `fleet_engine.py` puts them into the engine's file."""
    folder = Path(given["run_dir"])
    options = folder / "fake.json"
    options.write_text(json.dumps(given.get("fake", {})))
    return FleetConfig(
        models=(
            ModelSpec(name="org/fake", folder=Path("fake"), replicas=given.get("replicas", 1)),
            *[ModelSpec(name="org/far", folder=None, replicas=0, upstreams=(upstream,)) for upstream in given.get("upstreams", ())],
        ),
        gateway={**given["gateway"], "out": str(folder / "gateway.out")},
        drain_timeout_s=given.get("drain_timeout_s", 10),
        run_dir=folder,
        engine_command=(sys.executable, str(SUPPORT / "fleet_engine.py"), str(options)),
        gateway_command=(sys.executable, str(SUPPORT / "fake_gateway.py")),
    )


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


async def supervise(given: dict[str, Any]) -> int:
    supervisor: Supervisor

    def ready(facts: FleetReady) -> None:
        pids = {keeper.label: keeper.pid for keeper in (*supervisor.engines, *supervisor.gateways)}
        say("ready", pids=pids, replicas={name: dict(told) for name, told in facts.replicas.items()}, gateway=dict(facts.gateway))

    supervisor = Supervisor(fleet_config(given), on_ready=ready)
    return await supervisor.run()


def main() -> None:
    set_up_logging(LogFormat.TEXT)
    given = json.loads(Path(sys.argv[1]).read_text())
    try:
        status = asyncio.run(supervise(given))
    except HeadraceError as error:
        say("failed", kind=type(error).__name__, message=str(error))
        status = 3
    sys.exit(status)


if __name__ == "__main__":
    main()
