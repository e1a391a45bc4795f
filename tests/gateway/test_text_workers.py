"""Real worker processes: what a template or a text may take is bounded, a worker that exceeds it is replaced, and nobody else is hurt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import text_kit
from gateway_kit import eventually

from headrace.core.errors import InvalidRequest, Overloaded, Unavailable
from headrace.gateway.config import Limits
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.host_socket import HostSocket
from headrace.gateway.text_workers.limits import HEAVY_BYTES, START_CPU_S
from headrace.gateway.text_workers.model_text import ModelText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import COMMAND, HostProcess, WorkerProcess
from headrace.gateway.text_workers.workers import Worker
from headrace.gateway.upstream.generation_request import Conversation
from headrace.text.folder import TextModel, load_text

LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
STEERED = (
    "{% set said = messages[0].content %}"
    "{% if said == 'loop' %}" + LOOP + "{% endif %}"
    "{% if said == 'multiply' %}{{ (said * 10 ** 9) | length }}{% endif %}"
    "{% if said == 'double' %}{% set ns = namespace(s=said) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{% endif %}"
    "{% if said == 'write' %}{% for i in range(90000) %}{{ said * 100 }}{% endfor %}{% endif %}" + text_kit.CHATML
)
"""A template that a client's words lead astray."""


def says(content: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@asynccontextmanager
async def workers(
    folder: Path, *, max_workers: int = 2, max_queue: int = 100
) -> AsyncIterator[tuple[ModelText, TextPool, HostProcess, TextModel]]:
    text = load_text(folder)
    host = HostProcess(frames.HostConfig({"fox": str(folder)}, Limits()))
    async with TextPool(host, max_workers=max_workers, max_queue=max_queue, max_queue_bytes=8 << 20) as pool:
        yield ModelText(pool, "fox", text.tokenizer), pool, host, text
        pool.check()
    assert host._process is None


async def encode(text: ModelText, content: str, tenant: str = "t") -> list[int]:
    ids, _ = await text.encode_chat(Conversation(messages=says(content)), max_model_len=None, tenant=tenant)
    return list(ids)


async def stop_worker(pool: TextPool, host: HostProcess) -> None:
    """Stop the only worker by a signal: its next job lasts until it is killed, however late this process comes to that."""
    await eventually(lambda: len(pool._idle) == 1)
    assert host._process is not None
    (worker,) = psutil.Process(host._process.pid).children()
    worker.suspend()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return text_kit.save_byte_level(tmp_path / "m", chat_template=STEERED)


async def test_workers_answer_as_the_plain_twin_does(folder: Path) -> None:
    async with workers(folder) as (text, _, _, own):
        for content in ("Hello", "<|im_end|>", "caf\u00e9 \U0001f389" * 5000, ""):
            assert await encode(text, content) == own.template.encode(own.tokenizer, says(content))
        texts = ["one", "<|im_start|>", "x" * 100_000, "four"]
        got = await text.encode(texts, add_special_tokens=True, max_model_len=None, tenant="t")
        assert [list(ids) for ids in got] == [own.tokenizer.encode(one, add_special_tokens=True) for one in texts]
        ids = own.tokenizer.encode("The quick brown fox", add_special_tokens=True)
        assert await text.decode(ids, field="tokens", tenant="t") == own.tokenizer.decode(ids)
        count, ids_json, texts_json = await text.tokenize("The fox", add_special_tokens=False, needs_texts=True, tenant="t")
        assert json.loads(ids_json) == own.tokenizer.encode("The fox", add_special_tokens=False)
        assert [own.tokenizer.token_to_id(one) for one in json.loads(texts_json)] == json.loads(ids_json)
        assert count == len(json.loads(ids_json))


async def test_refusals_come_across_whole(folder: Path) -> None:
    async with workers(folder) as (text, _, _, own):
        for messages in ([{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}], []):
            with pytest.raises(InvalidRequest) as plain:
                own.template.encode(own.tokenizer, messages)
            with pytest.raises(InvalidRequest) as caught:
                await text.encode_chat(Conversation(messages=messages), max_model_len=None, tenant="t")
            assert str(caught.value) == str(plain.value)
            assert caught.value.field == plain.value.field
        for wrong in (10**6, 2**40, -1):
            with pytest.raises(InvalidRequest) as caught:
                await text.decode([5, wrong], field="tokens", tenant="t")
            assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    ("content", "bounds"),
    [("loop", {"cpu": "CPU time"}), ("multiply", {"memory": "memory"}), ("double", {"memory": "memory", "cpu": "CPU time"})],
)
async def test_a_template_led_astray_costs_its_own_request_only(folder: Path, content: str, bounds: dict[str, str]) -> None:
    """bounds: those that may be met, with the word for each. Doubling fills 64 MiB in a third of its 0.1 s of CPU time where memory comes
    quickly, and in more than that on a machine where several processes take pages at once: which bound is met first is not promised."""
    async with workers(folder) as (text, pool, _, own):
        expected = own.template.encode(own.tokenizer, says("Hello"))
        results = await asyncio.gather(encode(text, content), *(encode(text, "Hello") for _ in range(20)), return_exceptions=True)
        assert isinstance(results[0], InvalidRequest)
        assert results[0].field == "messages"
        (reason,) = pool.num_killed
        assert bounds[reason] in str(results[0])
        assert "chat template is at fault" in str(results[0])
        assert results[1:] == [expected] * 20
        assert pool.num_killed[reason] == 1
        assert await encode(text, "Hello") == expected
        await eventually(lambda: len(pool._idle) == 2)


async def test_a_template_that_writes_too_much_is_refused(folder: Path) -> None:
    async with workers(folder) as (text, _, _, _):
        with pytest.raises(InvalidRequest, match=r"once rendered|memory|CPU time"):
            await encode(text, "write")


@pytest.mark.parametrize(
    ("template", "what", "cpu_s"),
    [
        ("{{ 'A' * 10**10 }}", "memory", START_CPU_S),
        # 0.1 s of CPU time where memory comes quickly
        ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory", START_CPU_S),
        (LOOP, "CPU time", 2.0),
        ("{% if %}", "not a valid template", START_CPU_S),
    ],
)
async def test_a_template_that_is_a_bomb_fails_its_model_alone(tmp_path: Path, template: str, what: str, cpu_s: float) -> None:
    """`{{ 'A' * 10**10 }}` is folded while it is compiled: the gateway itself grew to 9.6 GB."""
    folder = text_kit.save_byte_level(tmp_path / "m", chat_template=template)
    other = text_kit.save_byte_level(tmp_path / "other")
    host = HostProcess(frames.HostConfig({"fox": str(folder), "owl": str(other)}, Limits(), start_cpu_s=cpu_s))
    host.spawn()
    assert host._process is not None
    process = psutil.Process(host._process.pid)
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    async with TextPool(host, max_workers=1, max_queue=9, max_queue_bytes=1 << 20) as pool:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert [*pool.failures] == ["fox"]
        assert pool.failures["fox"].file == "chat_template"
        assert what in str(pool.failures["fox"])
        assert await encode(ModelText(pool, "owl", load_text(other).tokenizer), "Hello")
        with pytest.raises(Unavailable):
            await encode(ModelText(pool, "fox", load_text(other).tokenizer), "Hello")
    assert peak < 512 << 20


async def test_who_leaves_frees_its_place_and_its_worker(folder: Path) -> None:
    async with workers(folder, max_workers=1) as (text, pool, host, _):
        await stop_worker(pool, host)
        heavy = asyncio.create_task(text.encode(["fox " * (HEAVY_BYTES * 4)], add_special_tokens=False, max_model_len=None, tenant="t"))
        await eventually(lambda: len(pool._running) == 1)
        waiting = [asyncio.create_task(encode(text, "Hello")) for _ in range(10)]
        await eventually(lambda: pool.reading().num_waiting == 10)
        for task in waiting[:9]:
            task.cancel()
        await eventually(lambda: pool.reading().num_waiting == 1)
        heavy.cancel()
        assert await waiting[9]
        assert pool.num_killed == {"left": 1}
        assert pool.reading().num_waiting_bytes == 0


async def test_heavy_jobs_leave_one_worker_to_short_ones(folder: Path) -> None:
    async with workers(folder) as (text, pool, _, _):
        big = ["fox " * (HEAVY_BYTES * 2)]
        heavy = [asyncio.create_task(text.encode(big, add_special_tokens=False, max_model_len=None, tenant="t")) for _ in range(4)]
        await eventually(lambda: len(pool._running) == 1 and pool.reading().num_waiting <= 3)
        for _ in range(5):
            assert await encode(text, "Hello")
        assert not all(task.done() for task in heavy)
        assert [len(ids) for ids in await asyncio.gather(*heavy)] == [1] * 4


async def test_a_burst_of_a_thousand_short_prompts_is_read(folder: Path) -> None:
    """The pool refused 670 of them for its 256 places although the engine queues 1,024."""
    async with workers(folder, max_queue=Limits().max_text_queue) as (text, pool, _, _):
        got = await asyncio.gather(*(encode(text, f"Hello {number}") for number in range(1000)))
        assert len(got) == 1000
        assert pool.num_refused == 0


async def test_a_full_queue_refuses(folder: Path) -> None:
    async with workers(folder, max_workers=1, max_queue=5) as (text, pool, _, _):
        got = await asyncio.gather(*(encode(text, "Hello") for _ in range(20)), return_exceptions=True)
        refused = [one for one in got if isinstance(one, Overloaded)]
        assert pool.num_refused == len(refused) >= 10
        assert await encode(text, "Hello")


async def test_a_lost_host_fails_what_ran_and_is_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.text_workers.processes.RESTART_S", 0.01)
    async with workers(folder, max_workers=1) as (text, pool, host, _):
        await encode(text, "Hello")
        await stop_worker(pool, host)
        running = asyncio.create_task(text.encode(["fox " * (HEAVY_BYTES * 4)], add_special_tokens=False, max_model_len=None, tenant="t"))
        waiting = asyncio.create_task(encode(text, "Hello"))
        await eventually(lambda: len(pool._running) == 1)
        assert host._process is not None
        host._process.kill()
        with pytest.raises(Unavailable):
            await running
        assert await waiting
        assert pool.num_killed == {"lost": 1}


class NoOwner:
    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None:
        raise AssertionError("it was asked for nothing")

    def ended(self, worker: Worker, number: int) -> None:
        pass


async def test_a_host_that_is_lost_while_it_forks_leaves_no_open_transport(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.text_workers.processes.RESTART_S", 60.0)
    transports: list[asyncio.BaseTransport] = []

    def connected(worker: WorkerProcess, transport: asyncio.BaseTransport) -> None:
        transports.append(transport)
        connection_made(worker, transport)

    def lost(channel: HostSocket, message: dict[str, object], descriptor: int) -> None:
        say_with(channel, message, descriptor)
        asyncio.get_running_loop().call_soon(host._lost)  # comes before the new worker's connection is made

    connection_made, say_with = WorkerProcess.connection_made, HostSocket.say_with
    async with workers(folder, max_workers=1) as (_, _, host, _):
        monkeypatch.setattr(WorkerProcess, "connection_made", connected)
        monkeypatch.setattr(HostSocket, "say_with", lost)
        with pytest.raises(OSError, match="could not fork"):
            await host._fork(NoOwner())
        assert [transport.is_closing() for transport in transports] == [True]


async def test_a_restart_that_fails_is_tried_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed start cancelled the task that tried: no text was read any more, and every request for it hung."""
    monkeypatch.setattr("headrace.gateway.text_workers.processes.RESTART_S", 0.01)
    hidden = tmp_path / "hidden"
    async with workers(folder, max_workers=1) as (text, pool, host, _):
        assert await encode(text, "Hello")
        assert not pool.reason
        assert host._process is not None
        first = host._process.pid
        folder.rename(hidden)
        host._process.kill()
        await eventually(lambda: host.reason != "")
        assert pool.reason == host.reason
        await eventually(lambda: host._process is not None and host._process.pid != first)
        second = host._process.pid
        await eventually(lambda: host._process is None or host._process.pid != second, within_s=30.0)
        hidden.rename(folder)
        async with asyncio.timeout(60):
            assert await encode(text, "Hello")
        assert not pool.reason


async def test_a_folder_that_is_damaged_at_a_restart_fails_its_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.text_workers.processes.RESTART_S", 0.01)
    folders = {name: text_kit.save_byte_level(tmp_path / name) for name in ("fox", "owl")}
    host = HostProcess(frames.HostConfig({name: str(folder) for name, folder in folders.items()}, Limits()))
    async with TextPool(host, max_workers=1, max_queue=9, max_queue_bytes=1 << 20) as pool:
        tokenizer = load_text(folders["fox"]).tokenizer
        (folders["fox"] / "tokenizer.json").unlink()
        assert host._process is not None
        host._process.kill()
        await eventually(lambda: [*pool.failures] == ["fox"] and not pool.reason, within_s=30.0)
        assert await encode(ModelText(pool, "owl", tokenizer), "Hello")
        with pytest.raises(Unavailable):
            await encode(ModelText(pool, "fox", tokenizer), "Hello")


async def test_while_the_host_is_down_jobs_wait_so_long_and_no_longer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.text_workers.processes.RESTART_S", 60.0)
    async with workers(folder, max_workers=1) as (text, _, host, _):
        assert await encode(text, "Hello")
        monkeypatch.setattr("headrace.gateway.text_workers.processes.ADD_TIMEOUT_S", 0.05)  # now: it bounds the first fork, too
        assert host._process is not None
        host._process.kill()
        await eventually(lambda: host.reason != "")
        for _ in range(3):
            with pytest.raises(Unavailable):
                async with asyncio.timeout(5):
                    await encode(text, "Hello")


BROKEN = """
import os
from headrace.gateway.text_workers import frames, host

frame, fork = frames.frame, os.fork
num_forks = 0

def broken_frame(answer, tail=b""):
    said = getattr(answer, "text", "")
    if said in ("fault", "memory"):
        raise MemoryError if said == "memory" else RuntimeError
    return frame(answer, tail)

def failing_fork():
    global num_forks
    num_forks += 1
    if num_forks in (2, 3):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

frames.frame = broken_frame
if NAME == "fork":
    os.fork = failing_fork
host.main()
"""


def broken_host(folder: Path, name: str) -> HostProcess:
    """A host whose workers fail outside the guarded part at the answers "fault" and "memory", or whose second and third fork fail."""
    program = f"NAME = {name!r}" + BROKEN
    return HostProcess(frames.HostConfig({"fox": str(folder)}, Limits()), command=(sys.executable, "-c", program))


async def test_a_fault_of_a_worker_costs_no_other_worker(folder: Path) -> None:
    """The exception went up into the child's copy of the host's loop, whose end kills every worker it knows: the siblings."""
    own = load_text(folder)
    host = broken_host(folder, "frame")
    async with TextPool(host, max_workers=3, max_queue=9, max_queue_bytes=1 << 20) as pool:
        text = ModelText(pool, "fox", own.tokenizer)
        assert host._process is not None
        parent = psutil.Process(host._process.pid)
        await eventually(lambda: len(pool._idle) == 3)
        before = {child.pid for child in parent.children()}
        for said, error in (("fault", Unavailable), ("memory", InvalidRequest)):
            ids = own.tokenizer.encode(said, add_special_tokens=False)
            with pytest.raises(error):
                await text.decode(ids, field="tokens", tenant="t")
            await eventually(lambda: len(pool._idle) == 3)
        assert len(before & {child.pid for child in parent.children()}) >= 1
        assert pool.num_killed == {"lost": 1, "memory": 1}
        pool.check()


async def test_a_fork_that_fails_is_tried_again_and_the_host_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.text_workers.pool.RETRY_S", 0.01)
    host = broken_host(folder, "fork")
    async with TextPool(host, max_workers=2, max_queue=9, max_queue_bytes=1 << 20) as pool:
        assert host._process is not None
        first = host._process.pid
        await eventually(lambda: len(pool._idle) == 2)
        assert host._process.pid == first
        assert await encode(ModelText(pool, "fox", load_text(folder).tokenizer), "Hello")
        pool.check()


ORPHANS = """
import asyncio, os, sys
from headrace.gateway.config import Limits
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.model_text import ModelText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import HostProcess
from headrace.gateway.upstream.generation_request import Conversation
from headrace.text.folder import load_text

async def main():
    host = HostProcess(frames.HostConfig({"fox": sys.argv[1]}, Limits()))
    async with TextPool(host, max_workers=2, max_queue=9, max_queue_bytes=1 << 24) as pool:
        text = ModelText(pool, "fox", load_text(sys.argv[1]).tokenizer)
        while len(pool._idle) < 2:
            await asyncio.sleep(0.01)
        asyncio.create_task(text.encode(["fox " * 400_000], add_special_tokens=False, max_model_len=None, tenant="t"))
        await asyncio.sleep(0.05)
        print(host._process.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_worker_outlives_the_gateway(folder: Path) -> None:
    """Not even one in the middle of a job, and not when the gateway is killed."""
    process = subprocess.Popen([sys.executable, "-c", ORPHANS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    host = psutil.Process(int(process.stdout.readline()))
    family = [host, *host.children()]
    assert len(family) == 3
    process.kill()
    process.wait(30)
    process.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


async def test_a_worker_that_grew_is_replaced(folder: Path) -> None:
    async with workers(folder, max_workers=1) as (text, pool, host, _):
        assert host._process is not None
        parent = psutil.Process(host._process.pid)
        await eventually(lambda: len(pool._idle) == 1)
        await eventually(lambda: len(parent.children()) == 1)  # the host takes a moment to fork
        before = {child.pid for child in parent.children()}
        await text.encode(["fox " * 250_000], add_special_tokens=False, max_model_len=None, tenant="t")
        assert await encode(text, "Hello")
        await eventually(lambda: before.isdisjoint(child.pid for child in parent.children()))
        assert sum(child.memory_info().rss for child in parent.children()) < 256 << 20
        assert not pool.num_killed


def test_a_host_whose_gateway_is_gone_leaves_quietly(folder: Path) -> None:
    """A gateway that refused its configuration left a BrokenPipeError's traceback below its one line."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        ours.sendall(json.dumps({"config": msgspec.to_builtins(frames.HostConfig({"fox": str(folder)}, Limits()))}).encode() + b"\n")
        ours.shutdown(socket.SHUT_RD)  # what it says meets a broken pipe
        ended = subprocess.run(COMMAND, stdin=theirs.fileno(), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_wrong_folder_of_the_only_model_is_refused_in_one_line(tmp_path: Path) -> None:
    """The line goes to the supervisor, which shows the reason; the log has one too, without the folder."""
    config = tmp_path / "gateway.json"
    model = {"name": "fox", "folder": str(tmp_path / "none"), "replicas": [{"name": "r0", "address": "unix:/none"}]}
    config.write_text(json.dumps({"models": [model]}), encoding="utf-8")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "headrace", "gateway", "--config", str(config), "--parent-fd", str(theirs.fileno())]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, pass_fds=(theirs.fileno(),))
        (line,) = ours.recv(1 << 16).splitlines()
    said = json.loads(line)
    assert (said["event"], said["can_retry"]) == ("failed", False)
    assert said["reason"].startswith("fox/tokenizer.json: is missing from the model folder")
    (logged,) = ended.stderr.splitlines()
    assert json.loads(logged)["message"].startswith("fox is not served until a reload: tokenizer.json: is missing from the model folder")
    assert ended.returncode


async def test_a_text_is_split_by_a_worker_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where spaces do not count, the bound splits the text: 8 ms of the event loop per megabyte."""
    folder = text_kit.save_byte_level(tmp_path / "m")
    text_kit.let_tokens_swallow_spaces(folder)
    loops = []
    monkeypatch.setattr("headrace.gateway.text_workers.model_text.check_fits", lambda *_: loops.append(1))
    async with workers(folder) as (text, _, _, own):
        assert own.tokenizer.bound is not None
        assert not own.tokenizer.bound.counts_spaces
        with pytest.raises(ContextLengthExceeded):
            await text.encode(["x " * 10_000], add_special_tokens=False, max_model_len=100, tenant="t")
    assert not loops


async def test_a_signal_from_outside_costs_one_job(folder: Path) -> None:
    async with workers(folder, max_workers=1) as (text, pool, host, _):
        assert host._process is not None
        await eventually(lambda: len(pool._idle) == 1)
        parent = psutil.Process(host._process.pid)
        await eventually(lambda: len(parent.children()) == 1)  # the host takes a moment to fork
        os.kill(parent.children()[0].pid, signal.SIGKILL)
        await eventually(lambda: not pool._idle)
        assert await encode(text, "Hello")


async def test_another_host_takes_over_while_a_long_job_runs(folder: Path, tmp_path: Path) -> None:
    """A model comes: its jobs are done at once, the running one where it began, and then the first host is gone."""
    other = text_kit.save_byte_level(tmp_path / "other", chat_template=STEERED)
    async with workers(folder, max_workers=1) as (text, pool, host, own):
        first = host._process
        assert first is not None
        content = "fox " * (HEAVY_BYTES * 4)
        long = asyncio.create_task(text.encode([content], add_special_tokens=False, max_model_len=None, tenant="t"))
        await eventually(lambda: len(pool._running) == 1)
        both = HostProcess(frames.HostConfig({"fox": str(folder), "owl": str(other)}, Limits()))
        await both.start()
        pool.replace(both, max_workers=2)
        owl = ModelText(pool, "owl", own.tokenizer)
        assert await encode(owl, "Hello") == await encode(text, "Hello")
        [ids] = await long
        assert list(ids) == own.tokenizer.encode(content, add_special_tokens=False)
        await eventually(lambda: first.poll() is not None)
        pool.check()
