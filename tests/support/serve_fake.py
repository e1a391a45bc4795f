"""A deployment as `headrace serve` starts it, except that its engines compute nothing: real supervisor, gateway, wire and scheduler.

    python serve_fake.py FILE     {"folder": text model, "replicas": 1, "run_dir": "/tmp/x", "gateway": {}, "engine": {}, "fake": {}}

Says what `headrace serve` says when it serves, and exits as it does.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.fleet.supervisor import FleetReady, run_fleet
from headrace.observe.logs import set_up_logging

ENGINE = Path(__file__).with_name("fleet_engine.py")


def announce(ready: FleetReady) -> None:
    logging.info("Serving fake at http://127.0.0.1:%s", ready.gateway["port"])


def main() -> None:
    set_up_logging()
    path = Path(sys.argv[1])
    given = json.loads(path.read_text())
    options = path.with_name("fake.json")
    options.write_text(json.dumps(given.get("fake", {})))
    model = ModelSpec(name="fake", folder=Path(given["folder"]), replicas=given.get("replicas", 1), engine=given.get("engine", {}))
    config = FleetConfig(
        models=(model,),
        gateway={"port": 0, "request_log": "off", **given.get("gateway", {})},
        drain_timeout_s=given.get("drain_timeout_s", 20.0),
        run_dir=Path(given["run_dir"]),
        engine_command=(sys.executable, str(ENGINE), str(options)),
    )
    sys.exit(int(run_fleet(config, on_ready=announce)))


if __name__ == "__main__":
    main()
