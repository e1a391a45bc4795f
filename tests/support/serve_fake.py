"""Starts a deployment as `headrace serve` does, except that its engines compute nothing: real supervisor, gateway, wire and scheduler.

    python serve_fake.py FILE     {"folder": text model, "replicas": 1, "run_dir": "/tmp/x", "gateway": {}, "engine": {}, "fake": {}}

"models" names several, which share the folder: {"fake": {"replicas": 2}, "guest": {}}. The file is read again at a reload. Says what
`headrace serve` says when it serves, and exits as it does.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from fleet_source import FileSource

from headrace.fleet.config import FleetConfig, ModelSpec, ReplicaRange
from headrace.fleet.supervisor import FleetReady, run_fleet
from headrace.machine.standard_streams import prepare_standard_streams
from headrace.observe.logs import set_up_logging

ENGINE = Path(__file__).with_name("fleet_engine.py")


def announce(ready: FleetReady) -> None:
    logging.info("Serving fake at http://127.0.0.1:%s", ready.gateway["port"])


def config_of(given: dict[str, Any]) -> FleetConfig:
    options = Path(given["run_dir"]) / "fake.json"
    options.write_text(json.dumps(given.get("fake", {})))
    engine, folder = given.get("engine", {}), Path(given["folder"])
    models = given.get("models", {"fake": {"replicas": given.get("replicas", 1)}})
    return FleetConfig(
        models=tuple(
            ModelSpec(
                name=name,
                folder=folder,
                aliases=tuple(model.get("aliases", ())),
                replicas=model.get("replicas", 1),
                autoscale=ReplicaRange(**model["autoscale"]) if "autoscale" in model else None,
                standby=model.get("standby", 0),
                engine={**engine, **model.get("engine", {})},
            )
            for name, model in models.items()
        ),
        gateway={"port": 0, "request_log": "off", **given.get("gateway", {})},
        drain_timeout_s=given.get("drain_timeout_s", 20.0),
        run_dir=given["run_dir"],
        engine_command=(sys.executable, str(ENGINE), str(options)),
    )


def main() -> None:
    prepare_standard_streams()
    set_up_logging()
    source = FileSource(Path(sys.argv[1]), config_of)
    sys.exit(int(run_fleet(source.config(), source=source, on_ready=announce)))


if __name__ == "__main__":
    main()
