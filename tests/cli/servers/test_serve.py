"""Tests that flags become configuration, and that what is printed at start can be used as it stands."""

from __future__ import annotations

import inspect
import io
import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.chat.child import URL_LINE
from headrace.cli.config.load import load
from headrace.cli.config.sections import ServeConfig
from headrace.cli.flags.flag import GivenFlags, given_flags
from headrace.cli.flags.rows import SERVE_FLAGS
from headrace.cli.servers import announcement
from headrace.cli.servers import serve as serve_module
from headrace.cli.servers.announcement import announce
from headrace.cli.servers.serve import serve
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.fleet.config import FleetConfig
from headrace.fleet.supervisor import FleetReady
from headrace.lab.plan import here
from headrace.observe.logs import LogFormat, set_up_logging
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure


def config_with(model_folder: Path, **params: object) -> ServeConfig:
    return load(None, {}, given_flags(SERVE_FLAGS, {"model_argument": str(model_folder), **params}))


def test_every_flag_reaches_the_configuration(model_folder: Path) -> None:
    config = config_with(
        model_folder,
        served_model_name=["main", "alias"],
        host="localhost",
        port=0,
        api_key=["a-long-enough-key", "another-long-key"],
        allowed_hosts=["models.example"],
        allowed_origins=["https://a.example", "https://b.example"],
        replicas=2,
        gateway_workers=3,
        dtype="float32",
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        block_size=8,
        num_kv_blocks=50,
        kv_cache_bytes=1 << 20,
        gpu_memory_utilization=0.25,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        scheduling_policy="sjf",
        async_scheduling=True,
        kernels="reference",
        num_threads=1,
        device="cuda",
        experimental=True,
        seed=9,
        drain_timeout=1.5,
        request_log="/var/log/requests.jsonl",
        otlp_traces_endpoint="http://localhost:4318",
        log_format="json",
    )
    (model,) = config.models
    assert model.engine == EngineConfig(
        model=str(model_folder),
        dtype="float32",
        load_format="dummy",
        max_model_len=128,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        block_size=8,
        num_kv_blocks=50,
        kv_cache_bytes=1 << 20,
        memory_fraction=0.25,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        queue_policy="sjf",
        depth=2,
        kernels="reference",
        num_threads=1,
        device="cuda",
        seed=9,
    )
    assert (model.name, model.aliases, model.replicas) == ("main", ("alias",), 2)
    assert (config.gateway.host, config.gateway.port, len(config.gateway.api_keys)) == ("localhost", 0, 2)
    assert config.gateway.workers == config.fleet(Path).num_gateways == 3
    assert config.gateway.allowed_hosts == ("models.example",)
    assert config.gateway.allowed_origins == ("https://a.example", "https://b.example")
    assert (config.drain_timeout_s, config.log_format) == (1.5, "json")
    assert config.gateway.request_log == "/var/log/requests.jsonl"
    assert config.gateway.traces_url == "http://localhost:4318/v1/traces"


def test_flags_not_given_leave_every_default(model_folder: Path) -> None:
    given = config_with(model_folder, enable_prefix_caching=None, allow_open=None, experimental=None, api_key=[], served_model_name=None)
    assert given == load(None, {}, GivenFlags({"model.engine.model": str(model_folder)}))


def test_every_parameter_of_serve_is_used(model_folder: Path) -> None:
    assert set(inspect.signature(serve).parameters) == {"config", *(flag.parameter for flag in SERVE_FLAGS)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stderr."""
    found = Terminal()
    monkeypatch.setattr(announcement, "sys", SimpleNamespace(stderr=found))
    return found


TWO = {"decided": ["2 threads: the cgroup allows 2", "500 KV blocks: 0.5 of 4 GiB"]}
READY = FleetReady({"host": "127.0.0.1", "port": 8123}, {"tiny-0": TWO, "tiny-1": TWO})


def test_the_announcement_says_where_how_and_why(model_folder: Path, terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    announce(config_with(model_folder, served_model_name=["tiny"]), READY)
    text = terminal.getvalue()
    found = URL_LINE.search(text)
    assert found is not None
    assert found.group(1) == "http://127.0.0.1:8123"
    assert text.count("500 KV blocks") == 1
    assert "tiny-0, tiny-1" in text
    assert text.index("500 KV blocks") < text.index("No API key is set") < text.index("Serving "), "what serves comes last"
    curl = shlex.split(text[text.index("curl") :])
    assert curl[1] == "http://127.0.0.1:8123/v1/chat/completions"
    assert json.loads(curl[curl.index("-d") + 1])["model"] == "tiny"
    assert capsys.readouterr().out == "", "the request log has stdout to itself"


@pytest.mark.parametrize(("is_terminal", "log_format"), [(False, "auto"), (False, "text"), (True, "json")])
def test_machines_read_it_in_the_log(model_folder: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, log_format: str) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging(LogFormat(log_format))
    announce(config_with(model_folder, served_model_name=["tiny"], log_format=log_format), READY)
    *notes, last = stream.getvalue().splitlines()
    assert [sum(what in line for line in notes) for what in ("500 KV blocks", "No API key is set")] == [1, 1]
    found = URL_LINE.search(last)
    assert found is not None
    assert found.group(1) == "http://127.0.0.1:8123"
    if log_format != "text":
        assert json.loads(last)["url"] == "http://127.0.0.1:8123"
        assert json.loads(last)["models"] == ["tiny"]


@pytest.mark.parametrize(
    ("folder", "name"), [("My Model", "My-Model"), ("Mod\u00e8le", "Modele"), ("it's 100% #1", "it-s-100-1"), ("-x", "x")]
)
def test_a_folder_of_any_name_is_served_under_a_name_that_is_said(tmp_path: Path, terminal: Terminal, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text("{}")
    config = config_with(tmp_path / folder)
    assert [model.served_name for model in config.models] == [name]
    announce(config, READY)
    assert f"{folder!r} is no model name: it is served as {name}; --served-model-name" in terminal.getvalue()
    named = config_with(tmp_path / folder, served_model_name=["mine"])
    assert (named.models[0].served_name, named.models[0].renamed) == ("mine", "")


def test_two_folders_of_one_name_are_refused_with_a_remedy(tmp_path: Path) -> None:
    for folder in ("My Model", "My-Model"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"models": [{"engine": {"model": str(tmp_path / folder)}} for folder in ("My Model", "My-Model")]}))
    with pytest.raises(ConfigError, match=r"models\[1\]\.name: 'My-Model' is served twice\. Write another name"):
        load(file, {})


@pytest.mark.parametrize("host", ["", "[]"])
def test_an_empty_host_is_refused_by_both_commands(model_folder: Path, host: str) -> None:
    """An unset variable of a script must not open every address, and is not the default either."""
    with pytest.raises(ConfigError, match=r"host: .* names no address"):
        config_with(model_folder, host=host)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:5"),
        ("[::1]", "http://[::1]:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("10.1.2.3", "http://10.1.2.3:5"),
    ],
)
def test_announced_url_can_be_reached_from_here(model_folder: Path, terminal: Terminal, host: str, url: str) -> None:
    config = config_with(model_folder, host=host, api_key=["a-long-enough-key"])
    announce(config, FleetReady({"host": host, "port": 5}, {}))
    out = terminal.getvalue()
    assert f" at {url}\n" in out
    assert "YOUR_KEY" in out
    assert "a-long-enough-key" not in out


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[FleetReady, list[int]]]:
    """A gateway that answers each question with the next status, the last one for ever, and writes down what it said."""
    said: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said.append(statuses[min(len(said), len(statuses) - 1)])
            self.send_response(said[-1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield FleetReady({"host": "127.0.0.1", "port": server.server_address[1]}, {}), said
        server.shutdown()
        thread.join()


def test_a_page_of_any_origin_is_told_from_an_address_alone(model_folder: Path, terminal: Terminal) -> None:
    announce(config_with(model_folder, allowed_origins=["*"]), READY)
    assert "every web page that is opened in reach of this address may use it" in terminal.getvalue()
    announce(config_with(model_folder, allowed_origins=["*"], api_key=["a-long-enough-key"]), READY)
    assert terminal.getvalue().count("every web page") == 1


@pytest.mark.socket
def test_a_gateway_that_gets_ready_is_serving(model_folder: Path, terminal: Terminal) -> None:
    with answering(503, 200) as (ready, said):
        announcement.announce_when_ready(config_with(model_folder), ready)
    assert said == [503, 200, 200], "a first replica, then all of them"
    out = terminal.getvalue()
    assert "Serving " in out
    assert "Not ready" not in out


@pytest.mark.socket
def test_what_serves_is_announced_before_replicas_that_never_get_ready(
    model_folder: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(announcement, "time", SimpleNamespace(monotonic=clock, sleep=clock.wait))
    with answering(200, 503) as (ready, said):
        announcement.announce_when_ready(config_with(model_folder), ready)
    assert said[0] == 200
    assert said[1:] == [503] * (len(said) - 1)
    assert len(said) - 1 == round(announcement.STRAGGLERS_S / announcement.POLL_S) + 1, "at once, and until the time is over"
    out = terminal.getvalue()
    assert URL_LINE.search(out)
    assert "Not every replica is ready: see http://127.0.0.1:" in out


@pytest.mark.socket
def test_replicas_that_failed_or_still_start_are_named_and_not_waited_for(model_folder: Path, terminal: Terminal) -> None:
    with answering(200, 503) as (ready, said):
        late = replace(ready, failed={"a-0": "its weights are broken"}, starting=["b-0"])
        announcement.announce_when_ready(config_with(model_folder), late)
    assert said == [200]
    out = terminal.getvalue()
    assert out.index("a-0 cannot be started: its weights are broken") < out.index("b-0 is still starting.") < out.index("Serving ")


@pytest.mark.socket
def test_what_never_gets_ready_is_announced_as_such(model_folder: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(announcement, "time", SimpleNamespace(monotonic=clock, sleep=clock.wait))
    monkeypatch.setattr(announcement, "READY_TIMEOUT_S", 0.6)
    with answering(503) as (ready, said):
        announcement.announce_when_ready(config_with(model_folder), ready)
    assert said == [503] * 4, "at once, and every quarter of a second until the time is over"
    out = terminal.getvalue()
    assert URL_LINE.search(out)
    assert "Not ready yet, after 0.6 s" in out


@pytest.mark.socket
def test_a_taken_port_is_refused_at_once_with_what_to_do(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fleet.supervisor.run_fleet", lambda *args, **kwargs: pytest.fail("the fleet was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway.port: port {port} on 127.0.0.1 is in use.*--port 0"):
            serve_module.run(config_with(model_folder, port=port))


@pytest.mark.socket
def test_the_number_of_ranks_is_decided_before_they_are_started(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[FleetConfig] = []

    def run_fleet(fleet: FleetConfig, **others: object) -> int:
        started.append(fleet)
        return 0

    monkeypatch.setattr("headrace.fleet.supervisor.run_fleet", run_fleet)
    monkeypatch.setattr(here, "memory_domains", lambda cpus: [[0, 1]])
    options = {"device": "cpu", "tensor_parallel_size": "auto", "port": 0, "state": str(tmp_path / "state")}
    assert serve_module.run(config_with(model_folder, **options)) == 0
    assert [model.num_ranks for fleet in started for model in fleet.models] == [1]
