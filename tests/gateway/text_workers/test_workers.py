"""Tests real text workers: a template's or text's use is bounded, a worker that exceeds it is replaced, and no other worker is hurt.

What the gateway does when a host or a worker is lost, slow or not to be had is shown on virtual time, in test_host.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import text_kit
from patience import PATIENCE_S, eventually
from server_kit import is_alive

from headrace.core.errors import InvalidRequest, Unavailable
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import COMMAND, HostProcess
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.own.model_text import ModelText
from headrace.text.folder import TextModel, load_text

pytestmark = pytest.mark.process

T = TypeVar("T")
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLE = "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
STEERED = (
    "{% set said = messages[0].content %}"
    "{% if said == 'loop' %}" + LOOP + "{% endif %}"
    "{% if said == 'multiply' %}{{ (said * 10 ** 9) | length }}{% endif %}"
    "{% if said == 'double' %}{% set ns = namespace(s=said) %}" + DOUBLE + "{% endif %}"
    "{% if said == 'write' %}{% for i in range(90000) %}{{ said * 100 }}{% endfor %}{% endif %}" + text_kit.CHATML
)
"""A template that a client's words lead astray."""
NUM_WORKERS = 3


class RunningPool:
    """A pool over real workers, on an event loop of its own thread, and what is asked of it. own: the plain twin"""

    def __init__(self, host: HostProcess, folder: Path) -> None:
        self.host = host
        self.own: TextModel = load_text(folder)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="text pool")
        self._thread.start()
        self.pool = TextPool(host, max_workers=NUM_WORKERS, max_queue=100)
        self.text = ModelText(self.pool, "fox", self.own.tokenizer)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self.loop).result()

    def eventually(self, condition: Callable[[], bool]) -> None:
        self.do(eventually(condition, PATIENCE_S))

    def all_idle(self) -> None:
        self.eventually(lambda: len(self.pool._idle) == NUM_WORKERS)
        self.pool.check()

    async def encode(self, content: str, model: str = "fox") -> list[int]:
        text = ModelText(self.pool, model, self.own.tokenizer)
        ids, _ = await text.encode_chat(Conversation(messages=says(content)), max_model_len=None, tenant="t")
        return list(ids)

    def plain(self, content: str) -> list[int]:
        return self.own.template.encode(self.own.tokenizer, says(content))

    @property
    def process(self) -> psutil.Process:
        assert self.host._process is not None
        return psutil.Process(self.host._process.pid)

    @property
    def pids(self) -> set[int]:
        """Of the workers."""
        return {child.pid for child in self.process.children()}

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


@contextmanager
def running(host: HostProcess, folder: Path) -> Iterator[RunningPool]:
    made = RunningPool(host, folder)
    try:
        made.do(made.pool.__aenter__())
        try:
            yield made
        finally:
            made.do(made.pool.__aexit__(None, None, None))
        assert host._process is None
    finally:
        made.close()


def says(content: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def host_of(folders: dict[str, Path], **options: Any) -> HostProcess:
    return HostProcess(frames.HostConfig({name: str(folder) for name, folder in folders.items()}, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_kit.save_byte_level(tmp_path_factory.mktemp("text") / "m", chat_template=STEERED)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[RunningPool]:
    """One pool for the tests that ask for it: each leaves it with all of its workers."""
    with running(host_of({"fox": folder}), folder) as made:
        yield made


def test_workers_answer_as_the_plain_twin_does(pool: RunningPool) -> None:
    own, text = pool.own.tokenizer, pool.text
    for content in ("Hello", "<|im_end|>", "caf\u00e9 \U0001f389" * 5000, ""):
        assert pool.do(pool.encode(content)) == pool.plain(content)
    texts = ["one", "<|im_start|>", "x" * 100_000, "four"]
    got = pool.do(text.encode(texts, add_special_tokens=True, max_model_len=None, tenant="t"))
    assert [list(ids) for ids in got] == [own.encode(one, add_special_tokens=True) for one in texts]
    ids = own.encode("The quick brown fox", add_special_tokens=True)
    assert pool.do(text.decode(ids, field="tokens", tenant="t")) == own.decode(ids)
    count, ids_json, texts_json = pool.do(text.tokenize("The fox", add_special_tokens=False, needs_texts=True, tenant="t"))
    assert json.loads(ids_json) == own.encode("The fox", add_special_tokens=False)
    assert [own.token_to_id(one) for one in json.loads(texts_json)] == json.loads(ids_json)
    assert count == len(json.loads(ids_json))


def test_refusals_come_across_whole(pool: RunningPool) -> None:
    for messages in ([{"role": "nobody", "content": "x"}], [{"role": "user", "content": 5}], []):
        with pytest.raises(InvalidRequest) as plain:
            pool.own.template.encode(pool.own.tokenizer, messages)
        with pytest.raises(InvalidRequest) as caught:
            pool.do(pool.text.encode_chat(Conversation(messages=messages), max_model_len=None, tenant="t"))
        assert str(caught.value) == str(plain.value)
        assert caught.value.field == plain.value.field
    for wrong in (10**6, 2**40, -1):
        with pytest.raises(InvalidRequest) as caught:
            pool.do(pool.text.decode([5, wrong], field="tokens", tenant="t"))
        assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    ("content", "bounds"),
    [("loop", {"cpu": "CPU time"}), ("multiply", {"memory": "memory"}), ("double", {"memory": "memory", "cpu": "CPU time"})],
)
def test_a_template_led_astray_costs_its_own_request_only(pool: RunningPool, content: str, bounds: dict[str, str]) -> None:
    """bounds: those that may be met, with the word for each. Doubling fills 64 MiB in a third of its 0.1 s of CPU time where memory comes
    quickly, and in more than that on a machine where several processes take pages at once: which bound is met first is not promised."""
    pool.all_idle()
    killed = pool.pool.num_killed.copy()

    async def together() -> list[list[int] | BaseException]:
        return await asyncio.gather(pool.encode(content), *(pool.encode("Hello") for _ in range(20)), return_exceptions=True)

    first, *others = pool.do(together())
    assert isinstance(first, InvalidRequest)
    assert first.field == "messages"
    [(reason, number)] = (pool.pool.num_killed - killed).items()
    assert (number, bounds[reason] in str(first), "chat template is at fault" in str(first)) == (1, True, True)
    assert others == [pool.plain("Hello")] * 20
    pool.all_idle()


def test_a_template_that_writes_too_much_is_refused(pool: RunningPool) -> None:
    with pytest.raises(InvalidRequest, match=r"once rendered|memory|CPU time"):
        pool.do(pool.encode("write"))
    pool.all_idle()


def test_a_worker_that_grew_is_replaced_and_counts_as_no_kill(pool: RunningPool) -> None:
    pool.all_idle()
    before, killed = pool.pids, pool.pool.num_killed.copy()
    pool.do(pool.text.encode(["fox " * 250_000], add_special_tokens=False, max_model_len=None, tenant="t"))
    pool.eventually(lambda: len(before & pool.pids) == NUM_WORKERS - 1)
    pool.all_idle()
    assert pool.do(pool.encode("Hello")) == pool.plain("Hello")
    assert pool.pool.num_killed == killed


def test_a_worker_that_is_killed_from_outside_is_replaced(pool: RunningPool) -> None:
    pool.all_idle()
    before = pool.pids
    os.kill(min(before), signal.SIGKILL)
    pool.eventually(lambda: len(pool.pool._idle) < NUM_WORKERS)
    pool.all_idle()
    assert len(before & pool.pids) == NUM_WORKERS - 1
    assert pool.do(pool.encode("Hello")) == pool.plain("Hello")


def test_a_killed_host_takes_its_workers_with_it_and_another_one_serves(pool: RunningPool) -> None:
    """One in the midst of a job, too, which reads nothing: the kernel ends it."""
    pool.all_idle()
    host, workers = pool.process, pool.process.children()
    workers[0].suspend()
    host.kill()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not [process for process in alive if is_alive(process.pid)]
    assert pool.do(pool.encode("Hello")) == pool.plain("Hello")
    pool.all_idle()
    assert pool.process.pid != host.pid


def test_a_template_that_is_a_bomb_fails_its_model_alone(tmp_path: Path) -> None:
    """`{{ 'A' * 10**10 }}` is folded while it is compiled: the gateway itself grew to 9.6 GB.

    One that loops ends the process that loads it, which is started again without that model. Which bound doubling meets first is not
    promised.
    """
    bombs = {
        "fold": ("{{ 'A' * 10**10 }}", ("memory",)),
        "double": ("{% set ns = namespace(s='x') %}" + DOUBLE, ("memory", "CPU time")),
        "wrong": ("{% if %}", ("not a valid template",)),
        "loop": (LOOP, ("CPU time",)),
    }
    folders = {name: text_kit.save_byte_level(tmp_path / name, chat_template=template) for name, (template, _) in bombs.items()}
    folders["owl"] = text_kit.save_byte_level(tmp_path / "owl")
    with running(host_of(folders, start_cpu_s=1.0), folders["owl"]) as pool:
        failures = dict(pool.pool.failures)
        assert set(failures) == set(bombs)
        for name, failure in failures.items():
            assert failure.file == "chat_template", name
            assert any(word in str(failure) for word in bombs[name][1]), failure
        assert pool.do(pool.encode("Hello", "owl")) == pool.plain("Hello")
        with pytest.raises(Unavailable):
            pool.do(pool.encode("Hello", "fold"))


BROKEN = """
import os
from headrace.gateway.text_host import TextContext
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
os.fork = failing_fork
host.main(lambda texts: TextContext(texts).answer)
"""
"""A host whose second and third fork fail, and whose workers fail outside the guarded part at the answers "fault" and "memory"."""


def test_a_fork_that_fails_is_tried_again_and_a_fault_of_a_worker_costs_no_other_worker(folder: Path) -> None:
    """The exception went up into the child's copy of the host's loop, whose end kills every worker it knows: the siblings."""
    host = HostProcess(frames.HostConfig({"fox": str(folder)}), command=(sys.executable, "-c", BROKEN))
    with running(host, folder) as pool:
        first = pool.process.pid
        pool.all_idle()
        for said, error, reason in (("fault", Unavailable, "lost"), ("memory", InvalidRequest, "memory")):
            before = pool.pids
            ids = pool.own.tokenizer.encode(said, add_special_tokens=False)
            with pytest.raises(error):
                pool.do(pool.text.decode(ids, field="tokens", tenant="t"))
            pool.all_idle()
            assert len(before & pool.pids) == NUM_WORKERS - 1
            assert pool.pool.num_killed[reason] == 1
        assert pool.process.pid == first, "the host stays"


def test_a_host_whose_gateway_is_gone_leaves_quietly(folder: Path) -> None:
    """A gateway that refused its configuration left a BrokenPipeError's traceback below its one line."""
    ours, theirs = socket.socketpair()
    with theirs, ours:
        ours.sendall(json.dumps({"config": msgspec.to_builtins(frames.HostConfig({"fox": str(folder)}))}).encode() + b"\n")
        ours.shutdown(socket.SHUT_RD)  # what it says meets a broken pipe
        ended = subprocess.run(COMMAND, stdin=theirs.fileno(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
