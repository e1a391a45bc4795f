"""The life of one worker: take a job, arm its bounds, do it, answer; until the gateway's end of the socket closes.

CPU time is bounded by the kernel: a timer whose signal ends the process, whatever Python or C code it is in. Memory is bounded by an
address space limit, which shows as a MemoryError, or as an abort in code that cannot raise one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys

from headrace.gateway.text_host.work import TextContext
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.limits import MIB, JobLimits

KEEPS_BYTES = 32 * MIB
"""A worker that has grown by more than this ends after its answer: a new one costs milliseconds, and freed memory rarely returns to the
system."""

PR_SET_PDEATHSIG = 1


def work(channel: socket.socket, context: TextContext, parent: int) -> None:
    """Runs in a forked process and never returns."""
    _die_with(parent)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_bytes, own_resident = memory_bytes()
    try:
        while (sizes := _exactly(channel, frames.SIZES.size)) is not None:
            num_head, num_tail = frames.SIZES.unpack(sizes)
            limits = JobLimits(num_head + num_tail)
            bound_memory(own_bytes + limits.memory_bytes)
            head, tail = _exactly(channel, num_head), _exactly(channel, num_tail)
            if head is None or tail is None:
                break
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            answer, answer_tail = context.answer(head, tail)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answer.is_last = answer.is_last or memory_bytes()[1] > own_resident + KEEPS_BYTES
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
    """Limit this process's address space to `num_bytes`. No effect where `memory_bytes` does not know the present size."""
    if memory_bytes()[0]:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard))


def unbound_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def memory_bytes() -> tuple[int, int]:
    """(address space, resident) of this process; zeros where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    """Exactly `num_bytes` from the socket; None when the other end closed it."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = channel.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)


def _die_with(parent: int) -> None:
    """A worker in the middle of a job reads nothing: the kernel ends it when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
