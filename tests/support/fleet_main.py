"""Runs a supervisor process of tests: fake engines and a fake gateway under the real one. Arguments: a JSON file; events go to stdout.

{"replicas": 2, "run_dir": "/tmp/x", "drain_timeout_s": 5, "gateway": {"work": "idle"}, "fake": {"step_seconds": 0.01}}

"models" names several: {"org/fake": {"replicas": 2, "engine": {}}}. The file is read again at a reload; "terminal" becomes the process's
own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from fleet_source import FileSource

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
        models=tuple(
            ModelSpec(name=name, folder=Path("fake"), replicas=model.get("replicas", 1), engine=model.get("engine", {}))
            for name, model in given.get("models", {"org/fake": given}).items()
        ),
        gateway={**given["gateway"], "out": str(folder / "gateway.out")},
        drain_timeout_s=given.get("drain_timeout_s", 10),
        run_dir=str(folder),
        engine_command=(sys.executable, str(SUPPORT / "fleet_engine.py"), str(options)),
        gateway_command=(sys.executable, str(SUPPORT / "fake_gateway.py")),
    )


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


async def supervise(path: Path) -> int:
    supervisor: Supervisor

    def ready(facts: FleetReady) -> None:
        pids = {keeper.label: keeper.pid for keeper in (*supervisor.engines, *supervisor.gateways) if keeper.pid}
        replicas = {name: dict(told) for name, told in facts.replicas.items()}
        say("ready", pids=pids, replicas=replicas, gateway=dict(facts.gateway))

    source = FileSource(path, fleet_config)
    supervisor = Supervisor(source.config(), source=source, on_ready=ready)
    return await supervisor.run()


def main() -> None:
    set_up_logging(LogFormat.TEXT)
    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    if "terminal" in given:
        os.setsid()
        os.open(given["terminal"], os.O_RDWR)  # the first one that a session's leader opens is its own
    try:
        status = asyncio.run(supervise(path))
    except HeadraceError as error:
        say("failed", kind=type(error).__name__, message=str(error))
        status = 3
    sys.exit(status)


if __name__ == "__main__":
    main()
