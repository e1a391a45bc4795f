"""Runs Ray's own autoscaler over nodes that are processes of this machine, and asks it for machines as a supervisor does.

Run it in a process namespace of its own, which ends every process of Ray with it. Prints how many nodes have
come for each request, and then what Ray has of a last one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from headrace.fleet.ray.cluster import RayCluster, ray_package
from headrace.fleet.ray.options import RayOptions

PATIENCE_S = 200.0
RISING = (1, 2)
AT_LAST = 1
"""Less than before: Ray counts idle nodes by address, and these nodes have one together, so that none leaves."""
COMMANDS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands", "head_start_ray_commands")
CLUSTER = {
    "cluster_name": "fake",
    "max_workers": 4,
    "provider": {"type": "fake_multinode", "disable_node_updaters": True, "worker_liveness_check": False},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 4},
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.05,
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "worker_start_ray_commands": [],
    **{name: [] for name in COMMANDS},
}


def main() -> None:
    ray = ray_package()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(CLUSTER, file)
        file.flush()
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--autoscaling-config={file.name}", "--num-cpus=0"]
        environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        subprocess.run([*start, "--disable-usage-stats", "--object-store-memory=80000000"], check=True, env=environment, stdout=sys.stderr)
        time.sleep(1)
        cluster = RayCluster(RayOptions(num_cpus=2))
        for number in RISING:
            cluster.request(number)
            ends_at = time.monotonic() + PATIENCE_S
            while (found := num_nodes(ray)) != number and time.monotonic() < ends_at:
                time.sleep(0.2)
            print(json.dumps({"asked": number, "nodes": found}), flush=True)
        cluster.request(AT_LAST)
        print(json.dumps(json.loads(ray.experimental.internal_kv._internal_kv_get(b"autoscaler_resource_request"))), flush=True)


def num_nodes(ray: object) -> int:
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
