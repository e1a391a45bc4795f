"""Loads the models' tokenizers and templates once, and forks text workers from itself; `gateway.text_host` starts it.

A fork of what is loaded takes milliseconds and shares its memory; it is only safe in a process without threads, which the gateway is not.
The host's standard input is one end of a socket pair; `processes.HostProcess` has the other. Messages are JSON lines.

    from the gateway   {"config": {...}}            once: which models
                       {"fork": 7} + a descriptor   worker 7 takes its jobs from that socket
                       {"kill": 7}
    to the gateway     {"loading": "fox"}           before each model, {"ready": true} after the last
                       {"forked": 7}                worker 7 takes jobs
                       {"refused": {...}}           a CheckpointError of the model that was loaded; the next one follows
                       {"ended": 7, "signal": 27}   worker 7 is gone; signal 0: it left by itself, or could not be forked

When the socket closes, all workers are killed and this process ends. The kernel bounds a worker's CPU time by a timer whose signal ends it
in any code. Memory is bounded by an address space limit, which shows as a MemoryError, or as an abort in code that cannot raise one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from headrace.core.errors import CheckpointError, HeadraceError
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.limits import MIB, START_MEMORY_BYTES, JobLimits
from headrace.machine.resources import process_memory
from headrace.machine.standard_streams import open_standard_descriptors, prepare_standard_streams
from headrace.text.folder import TextModel, load_text
from headrace.text.template import import_engine

KEEPS_BYTES = 32 * MIB
"""A worker that has grown by more ends after its answer, since freed memory rarely returns to the system."""

PR_SET_PDEATHSIG = 1

Answer = Callable[[bytes, bytes], tuple[frames.AnyAnswer, bytes]]
"""Head and tail of a job -> reply and tail."""


def work(channel: socket.socket, answer_of: Answer, parent: int) -> None:
    """Never returns: the process ends when `channel` is closed, or after it has grown too much."""
    _die_with(parent)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = process_memory()
    try:
        while (sizes := _exactly(channel, frames.SIZES.size)) is not None:
            num_head, num_tail = frames.SIZES.unpack(sizes)
            limits = JobLimits(num_head + num_tail)
            bound_memory(own.size + limits.memory_bytes)
            head, tail = _exactly(channel, num_head), _exactly(channel, num_tail)
            if head is None or tail is None:
                break
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            answer, answer_tail = answer_of(head, tail)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answer.is_last = answer.is_last or process_memory().resident > own.resident + KEEPS_BYTES
            channel.sendall(frames.frame(answer, answer_tail))
            if answer.is_last:
                break
            del head, tail, answer, answer_tail  # an idle worker keeps no request's data
    except MemoryError:
        os.abort()  # read, framed or sent under the bound: it ends as in code that cannot raise, and the pool reads the signal as memory
    except OSError:
        pass  # the gateway is gone, or has closed this worker's socket
    os._exit(0)


def bound_memory(num_bytes: int) -> None:
    """No effect where `process_memory` does not know the present size."""
    if process_memory().size:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard))


def unbound_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    """None when the other end closed the socket."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = channel.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)


def _die_with(parent: int) -> None:
    """The kernel kills this worker with its parent, since a worker in the middle of a job does not read its socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


MAX_FDS = 64


def main(answers: Callable[[Mapping[str, TextModel]], Answer]) -> None:
    prepare_standard_streams()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads would not survive a fork
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C signals the whole process group; the gateway decides when this process ends
    control = Control(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    with suppress(GatewayGone):
        serve(control, answers)


def serve(control: Control, answers: Callable[[Mapping[str, TextModel]], Answer]) -> None:
    """Returns or raises GatewayGone once the gateway is gone."""
    config = msgspec.convert(control.first()["config"], frames.HostConfig)
    texts: dict[str, TextModel] = {}
    for name, folder in config.models.items():
        try:
            texts[name] = load(name, folder, config.start_cpu_s, control)
        except CheckpointError as error:
            control.say({"refused": {"model": name, "file": error.file, "reason": error.reason, "remedy": error.remedy}})
    gc.collect()
    gc.freeze()
    control.say({"ready": True})
    Host(control, answers(texts)).run()


def load(name: str, folder: str, cpu_s: float, control: Control) -> TextModel:
    """Raises CheckpointError. Its bounds may end this process."""
    control.say({"loading": name})
    text = load_text(folder)
    if not text.template.exists:
        return text
    import_engine()  # not on the template's account
    bound_memory(process_memory().size + START_MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        text.template.compile()
        text.template.encode(text.tokenizer, [{"role": "user", "content": "Hello"}])
    except MemoryError as error:
        limit = f"needs more than {START_MEMORY_BYTES // MIB} MiB of memory to be compiled and to render a greeting"
        raise CheckpointError("chat_template", limit) from error
    except HeadraceError as error:
        if isinstance(error, CheckpointError):
            raise
        # the template refuses this greeting, and may accept other conversations
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        unbound_memory()
    return text


class GatewayGone(Exception):
    """The gateway refused to start, or was killed."""


class Control:
    """The host's end of the socket to the gateway."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._rest = b""
        self._fds: list[int] = []

    def say(self, message: Mapping[str, object]) -> None:
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise GatewayGone from error

    def first(self) -> dict[str, Any]:
        """Raises GatewayGone."""
        while True:
            messages = self.receive()
            if messages is None:
                raise GatewayGone
            if messages:
                return messages[0]

    def receive(self) -> list[dict[str, Any]] | None:
        """None when the gateway is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, 1 << 16, MAX_FDS)
        except OSError:
            return None
        if not data:
            return None
        self._fds += fds
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def take_fd(self) -> int:
        return self._fds.pop(0)


class Host:
    """Forks text workers, kills them on request, and reaps them."""

    def __init__(self, control: Control, answer_of: Answer) -> None:
        self._control = control
        self._answer_of = answer_of
        self._pid_of: dict[int, int] = {}

    def run(self) -> None:
        """Returns or raises GatewayGone once the gateway is gone."""
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker)
        try:
            while True:
                ready, _, _ = select.select([self._control.channel.fileno(), woken], [], [])
                if woken in ready:
                    os.read(woken, 4096)
                    self._reap()
                if self._control.channel.fileno() in ready:
                    messages = self._control.receive()
                    if messages is None:
                        return
                    for message in messages:
                        self._do(message)
        finally:
            for pid in self._pid_of.values():
                os.kill(pid, signal.SIGKILL)

    def _do(self, message: dict[str, Any]) -> None:
        if (number := message.get("fork")) is not None:
            self._fork(number, self._control.take_fd())
        elif (pid := self._pid_of.get(message["kill"])) is not None:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, number: int, fd: int) -> None:
        parent = os.getpid()
        with socket.socket(fileno=fd) as channel:
            try:
                pid = os.fork()
            except OSError as error:  # no process or no memory to be had now: the gateway asks again a moment later
                print(f"headrace text host: cannot fork: {error.strerror}", file=sys.stderr)
                self._control.say({"ended": number, "signal": 0})
                return
            if pid == 0:
                self._become_worker(channel, parent)
        self._pid_of[number] = pid
        self._control.say({"forked": number})

    def _become_worker(self, channel: socket.socket, parent: int) -> NoReturn:
        """No exception may reach `run`, whose `finally` would kill the other workers."""
        try:
            self._pid_of.clear()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.channel.close()
            os.close(sys.stdin.fileno())
            open_standard_descriptors()
            work(channel, self._answer_of, parent)
        except BaseException as error:  # the outermost border; messages of exceptions may quote a client's text
            where = "".join(traceback.format_tb(error.__traceback__))
            print(f"headrace text worker: ended by {type(error).__name__}\n{where}", file=sys.stderr, end="", flush=True)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for number, pid in list(self._pid_of.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pid_of[number]
                self._control.say({"ended": number, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0})
