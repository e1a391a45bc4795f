"""Runs a ClickHouse server of the tests' own: on a loopback port, in a temporary folder, with one user that has a password."""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from headrace.gateway.ledger.config import ClickHouseConfig

PROGRAM = shutil.which("clickhouse-server")
MISSING = "No ClickHouse server is installed: run `make servers`"
USER, PASSWORD = "ledger", "a-password-of-tests"
START_S = 60.0

CONFIG = """<yandex>
  <logger><level>warning</level><log>{folder}/log</log><errorlog>{folder}/errors</errorlog></logger>
  <http_port>{port}</http_port><tcp_port>{tcp_port}</tcp_port><listen_host>127.0.0.1</listen_host>
  <path>{folder}/data/</path><tmp_path>{folder}/tmp/</tmp_path><user_files_path>{folder}/files/</user_files_path>
  <format_schema_path>{folder}/schemas/</format_schema_path>
  <users_config>{folder}/users.xml</users_config><default_profile>default</default_profile><default_database>default</default_database>
  <mark_cache_size>5368709120</mark_cache_size><max_concurrent_queries>20</max_concurrent_queries>
</yandex>"""
USERS = """<yandex>
  <profiles><default><max_threads>1</max_threads></default></profiles>
  <quotas><default><interval><duration>3600</duration><queries>0</queries><errors>0</errors><result_rows>0</result_rows>
    <read_rows>0</read_rows><execution_time>0</execution_time></interval></default></quotas>
  <users><{user}><password>{password}</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota>
  </{user}></users>
</yandex>"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class ClickHouseServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._is_known = False
        """It has answered at its port, which clients may have by now."""
        for name in ("data", "tmp", "files", "schemas"):
            (folder / name).mkdir(parents=True)
        (folder / "users.xml").write_text(USERS.format(user=USER, password=PASSWORD))
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o600)
        self._choose_ports()

    def _choose_ports(self) -> None:
        self.port = free_port()
        (self.folder / "config.xml").write_text(CONFIG.format(folder=self.folder, port=self.port, tcp_port=free_port()))
        self.config = ClickHouseConfig(
            url=f"http://{USER}@127.0.0.1:{self.port}",
            table="headrace_test.headrace_usage",
            password_file=str(self.folder / "password"),
        ).checked("usage.clickhouse")

    def start(self) -> None:
        deadline = time.monotonic() + START_S
        process = self._launch()
        while not self._answers():
            if process.poll() is not None:
                errors = self.folder / "errors"
                said = errors.read_text()
                assert "Address already in use" in said, said
                assert not self._is_known, said
                errors.unlink()
                self._choose_ports()  # another process was faster to take a port
                process = self._launch()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        self._is_known = True

    def _launch(self) -> subprocess.Popen[bytes]:
        assert PROGRAM is not None, MISSING
        command = [PROGRAM, f"--config-file={self.folder / 'config.xml'}"]
        self._process = subprocess.Popen(
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/ping")
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except OSError:
            return False
        finally:
            connection.close()
