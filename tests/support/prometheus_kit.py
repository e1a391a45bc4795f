"""Runs Debian's Prometheus, with the shipped rules or a copy of them, on a loopback port; it scrapes one gateway each second."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from clickhouse_kit import free_port

PROGRAM = shutil.which("prometheus")
MISSING = "Prometheus is not installed: run `make servers`"
RULES = tuple(Path(__file__).parents[2] / "deploy" / "prometheus" / name for name in ("recording.yaml", "alerts.yaml"))


class Prometheus:
    """It runs until `stop`. folder: its own, for its data and its log"""

    def __init__(self, folder: Path, target_port: int, rules: tuple[Path, ...] = RULES) -> None:
        assert PROGRAM is not None, MISSING
        self.port = free_port()
        scraped = {"job_name": "headrace", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": list(map(str, rules)),
            "scrape_configs": [scraped],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))
        files = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with open(folder / "log", "wb") as log:
            address = f"--web.listen-address=127.0.0.1:{self.port}"
            self._process = subprocess.Popen([PROGRAM, *files, address], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **query: str) -> Any:
        """None while it starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except OSError:
            return None

    def series(self, expression: str) -> list[dict[str, Any]]:
        data = self.get("query", query=expression)
        return [] if data is None else list(data["result"])
