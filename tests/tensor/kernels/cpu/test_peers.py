"""Tests the exchanges between ranks: each rank is a thread with the same memory, and one test starts processes. Always to the bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from headrace.core.errors import EngineFatal
from headrace.core.parallelism import Parallelism
from headrace.tensor.kernels.cpu import peers as shared
from headrace.tensor.kernels.cpu.backend import KERNELS
from headrace.tensor.kernels.cpu.jit.launch import thread_limit
from headrace.tensor.kernels.cpu.launch_list import recording
from headrace.tensor.kernels.cpu.linear import StripLinear
from headrace.tensor.kernels.cpu.peers import AREA_BYTES, SharedMemoryPeers, shared_bytes

pytestmark = pytest.mark.pure

_Result = TypeVar("_Result")

DTYPES = (torch.float32, torch.bfloat16)
AREA = AREA_BYTES // 4
"""Floats in an area."""


PATIENCE_S = 10.0
"""Of one rank for another, so that ranks out of step fail soon, and not after MAX_WAIT_S each."""


def make_patient(peers: SharedMemoryPeers) -> SharedMemoryPeers:
    peers._stage = peers._stage._replace(max_wait_s=min(peers._stage.max_wait_s, PATIENCE_S))
    return peers


def make_peers(tp: int, pp: int = 1) -> list[SharedMemoryPeers]:
    parallelism = Parallelism(tp, pp)
    memory = mmap(-1, shared_bytes(parallelism))
    return [make_patient(SharedMemoryPeers(memory, parallelism.place(rank))) for rank in range(parallelism.world)]


def on_all(peers: Sequence[SharedMemoryPeers], work: Callable[[int, SharedMemoryPeers], _Result]) -> list[_Result]:
    """What each rank returns. A rank that fails ends the waiting of all."""

    def run(rank: int) -> _Result:
        try:
            return work(rank, peers[rank])
        except BaseException:
            peers[rank].abort()
            raise

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(run, range(len(peers))))


def summed(parts: Sequence[Tensor]) -> Tensor:
    """In the order of ranks, rounded once."""
    return reduce(torch.add, [part.float() for part in parts]).to(parts[0].dtype)


def gathered(parts: Sequence[Tensor], rank: int) -> Tensor:
    """The first rank alone reads it."""
    whole = torch.cat(list(parts), dim=1)
    return whole if rank == 0 else whole[:0]


def broadcast(peers: SharedMemoryPeers, x: Tensor) -> Tensor:
    peers.broadcast(x)
    return x


OPERATIONS: dict[str, tuple[Callable[[SharedMemoryPeers, Tensor], Tensor], Callable[[Sequence[Tensor], int], Tensor]]] = {
    "reduce": (SharedMemoryPeers.reduce, lambda parts, rank: summed(parts)),
    "gather": (SharedMemoryPeers.gather, gathered),
    "broadcast": (broadcast, lambda parts, rank: parts[0]),
}


def parts_of(tp: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Of sizes so far apart that another order of additions has other bits."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-3, 4, (tp, *shape), generator=generator)
    return list((torch.randn(tp, *shape, generator=generator) * scales).to(dtype))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


small = st.tuples(st.integers(0, 5), st.integers(1, 70))
large = st.tuples(st.integers(1, 3), st.sampled_from([AREA - 1, AREA, AREA + 1, AREA // 3 * 2, 2 * AREA + 17]))
calls = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.one_of(small, small, large), st.sampled_from(DTYPES)), min_size=1, max_size=6
)


@settings(max_examples=40, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # what fails by timing cannot be shrunk
@given(tp=st.integers(1, 4), calls=calls, seed=st.integers(0, 1000))
def test_any_calls_give_every_rank_the_bits_of_the_plain_twin(
    tp: int, calls: list[tuple[str, tuple[int, int], torch.dtype]], seed: int
) -> None:
    """Each call finds in the areas what earlier ones left there."""
    given_ = [parts_of(tp, shape, dtype, seed + number) for number, (_, shape, dtype) in enumerate(calls)]

    def work(rank: int, peers: SharedMemoryPeers) -> list[Tensor]:
        return [OPERATIONS[name][0](peers, parts[rank].clone()) for (name, _, _), parts in zip(calls, given_, strict=True)]

    for rank, results in enumerate(on_all(make_peers(tp), work)):
        for (name, shape, dtype), got, parts in zip(calls, results, given_, strict=True):
            assert same_bits(got, OPERATIONS[name][1](parts, rank)), (name, shape, dtype)


@pytest.mark.parametrize(
    ("dtype", "values", "want"),
    [
        (torch.float32, [1.0, 1e8, -1e8], 0.0),
        (torch.float32, [1e8, -1e8, 1.0], 1.0),
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),  # 256 if each addition were rounded
        (torch.float32, [-0.0, -0.0, -0.0], -0.0),
    ],
)
def test_sums_are_made_in_the_order_of_ranks_and_rounded_once(dtype: torch.dtype, values: list[float], want: float) -> None:
    for got in on_all(make_peers(len(values)), lambda rank, peers: peers.reduce(torch.full((3, 37), values[rank], dtype=dtype))):
        assert same_bits(got, torch.full((3, 37), want, dtype=dtype))


def test_ranks_may_compute_with_unequal_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    if thread_limit() == 1:
        pytest.skip("one CPU: every rank has one worker")
    mine = threading.local()
    monkeypatch.setattr(shared, "workers_for", lambda _: mine.workers)
    shape = (3, AREA + 100)
    given_ = [parts_of(2, shape, dtype, seed) for seed, dtype in enumerate(DTYPES * 2)]

    def work(rank: int, peers: SharedMemoryPeers) -> list[list[Tensor]]:
        mine.workers = 1 + rank
        results = []
        for parts in given_:
            moved = parts[rank].clone()
            peers.broadcast(moved)
            results.append([moved, peers.gather(parts[rank]), peers.reduce(parts[rank].clone())])
        return results

    for rank, results in enumerate(on_all(make_peers(2), work)):
        for got, parts in zip(results, given_, strict=True):
            assert all(map(same_bits, got, [parts[0], gathered(parts, rank), summed(parts)]))


@pytest.mark.parametrize("tp", [1, 2])
def test_stages_send_to_the_same_place_of_the_next_stage(tp: int) -> None:
    """More tensors than the areas hold, and larger ones: a stage that is ahead waits until they were received."""
    given_ = [parts_of(tp, shape, torch.float32, seed) for seed, shape in enumerate([(1, 5), (3, AREA), (7, 1), (2, 2 * AREA + 3)] * 3)]

    def work(rank: int, peers: SharedMemoryPeers) -> list[Tensor]:
        place, results = Parallelism(tp, 3).place(rank), []
        for parts in given_:
            x = parts[place.tp_rank].clone() if place.is_first else torch.full_like(parts[0], 7.0)
            if not place.is_first:
                peers.receive(x)
            x += place.stage
            if not place.is_last:
                peers.send(x)
            results.append(peers.reduce(x))
        return results

    for rank, results in enumerate(on_all(make_peers(tp, 3), work)):
        steps = sum(range(Parallelism(tp, 3).place(rank).stage + 1))
        for got, parts in zip(results, given_, strict=True):
            assert torch.equal(got, summed([part + 0 + 1 + 2 if steps == 3 else part + steps for part in parts]))


def test_a_recorded_step_exchanges_anew_each_time_it_is_replayed() -> None:
    """A sum is a kernel like others: it reads what the kernel before it made, and the next one reads the sum."""
    norm, rows, times = torch.randn(128), 3, 9
    linears = [[StripLinear.pack(torch.randn(128, 128) * 0.1, None) for _ in range(2)] for _ in range(2)]
    inputs = [torch.randn(rows, 128) for _ in range(times)]

    def twin(x: Tensor) -> Tensor:
        for layer in range(2):
            x = KERNELS.rms_norm(summed([linears[rank][layer](x) for rank in range(2)]), norm, 1e-5)
        return x

    def work(rank: int, peers: SharedMemoryPeers) -> list[Tensor]:
        x, results = torch.empty(rows, 128), []

        def step() -> Tensor:
            made = x
            for layer in range(2):
                made = KERNELS.rms_norm(peers.reduce(linears[rank][layer](made)), norm, 1e-5)
            return made

        x.copy_(inputs[0])
        with recording() as recorded:
            out = step()
        assert recorded.is_whole
        results.append(out.clone())
        for values in inputs[1:]:
            x.copy_(values)
            assert recorded.replay()
            results.append(out.clone())
        return results

    wants = [twin(x) for x in inputs]
    for results in on_all(make_peers(2), work):
        assert all(map(same_bits, results, wants))


# --- what ranks did ---


def test_every_rank_can_read_what_all_have_exchanged() -> None:
    """A tensor of two areas and a bit takes three exchanges; who receives, writes nothing."""
    peers, large = make_peers(2, 2), torch.ones(2, AREA + 3)

    def work(rank: int, each: SharedMemoryPeers) -> None:
        for _ in range(2):
            each.reduce(torch.ones(5))
        if rank < 2:
            each.receive(large.clone())
        else:
            each.send(large)
            each.note_step(500_000_000 * rank)

    on_all(peers, work)
    for each in peers:
        done = each.work()
        assert [one.num_exchanges for one in done] == [5] * 4
        assert [one.num_bytes for one in done] == [40, 40, 40 + large.nbytes, 40 + large.nbytes]
        assert [one.steps_s for one in done] == [0.0, 0.0, 1.0, 1.5]


@pytest.mark.parametrize("kind", ["link", "stage"])
def test_what_a_rank_waits_for_others_is_counted(kind: str) -> None:
    peers = make_peers(1, 2) if kind == "link" else make_peers(2)
    mine, its = ("receive", "send") if kind == "link" else ("reduce", "reduce")
    with ThreadPoolExecutor(1) as pool:
        while not peers[1].work()[0].waited_s:  # its first spins are not counted, and this thread may be the later one
            waiting = pool.submit(getattr(peers[0], mine), torch.ones(5))
            for _ in range(100):
                peers[1].work()
            getattr(peers[1], its)(torch.ones(5))
            waiting.result()
    done = peers[0].work()[0]
    assert done.link_waited_s == (done.waited_s if kind == "link" else 0.0)


# --- faults ---


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


@pytest.mark.parametrize("operation", ["reduce", "gather", "broadcast", "receive"])
def test_ranks_that_wait_are_woken_by_an_abort(operation: str) -> None:
    """Also the one that aborts raises from then on, and the one that had not called yet. In a gather only the first waits."""
    tp, pp = (1, 3) if operation == "receive" else (3, 1)
    peers, waits = make_peers(tp, pp), 0 if operation == "gather" else 1
    call: Callable[[SharedMemoryPeers], Any] = lambda each: getattr(each, operation)(torch.ones(2, 3))  # noqa: E731
    begun = threading.Barrier(2)

    def wait() -> None:
        begun.wait()
        call(peers[waits])

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        begun.wait()
        if operation in ("reduce", "gather"):
            until(lambda: peers[1 - waits].work()[waits].num_exchanges == 1)
        peers[1 - waits].abort()
        with pytest.raises(EngineFatal, match="another rank of this replica has ended"):
            waiting.result()
    for each in (peers[2], peers[1 - waits]) if operation != "receive" else (peers[0],):
        with pytest.raises(EngineFatal, match="another rank of this replica has ended"):
            call(each)


def test_a_rank_that_never_comes_ends_the_waiting_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_WAIT_S", 0.05)
    peers = make_peers(3)
    raised: list[str] = []

    def work(rank: int, each: SharedMemoryPeers) -> None:
        if rank != 1:
            with pytest.raises(EngineFatal) as caught:
                each.reduce(torch.ones(5))
            raised.append(str(caught.value))

    on_all(peers, work)
    assert raised == ["rank 1 was waited for too long by another rank of this replica"] * 2
    with pytest.raises(EngineFatal, match="rank 1 was waited for"):
        peers[1].reduce(torch.ones(5))


def test_a_late_stage_is_named_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_LINK_WAIT_S", 0.05)
    peers = make_peers(2, 3)
    sender, receiver = 4 + 1, 2 + 1  # stages 0 and 1, second ranks
    with pytest.raises(EngineFatal, match=f"rank {sender} was waited for"):
        peers[receiver].receive(torch.ones(5))
    peers = make_peers(2, 3)

    def send_twice() -> None:
        for _ in range(2):
            peers[sender].send(torch.ones(5))

    with pytest.raises(EngineFatal, match=f"rank {receiver} was waited for"):
        send_twice()


def test_an_exchange_of_strided_tensors_is_refused() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        make_peers(2)[0].reduce(torch.ones(4, 4)[:, :2])


# --- processes ---

MEMBER = """
import hashlib, mmap, sys
import torch
from headrace.core.parallelism import Parallelism
from headrace.tensor.kernels.cpu.peers import SharedMemoryPeers, shared_bytes
rank, fd = map(int, sys.argv[1:])
parallelism = Parallelism(2)
peers, said = SharedMemoryPeers(mmap.mmap(fd, shared_bytes(parallelism)), parallelism.place(rank)), hashlib.sha256()
for call in range(300):
    generator = torch.Generator().manual_seed(call)
    x = torch.randn(2, call % 7 + 1, 1000 if call % 50 else 100_000, generator=generator)
    x = x[rank].to(torch.bfloat16 if call % 3 == 0 else torch.float32)
    gathered = peers.gather(x)
    peers.reduce(x)
    for made in (gathered, x):
        said.update(made.view(torch.uint8).numpy().tobytes())
print(said.hexdigest())
"""


@pytest.mark.process
def test_processes_exchange_through_a_file_in_memory() -> None:
    memory = os.memfd_create("ranks")
    try:
        os.truncate(memory, shared_bytes(Parallelism(2)))
        start = partial(subprocess.Popen, pass_fds=[memory], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
        ranks = [start([sys.executable, "-c", MEMBER, str(rank), str(memory)]) for rank in range(2)]
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        os.close(memory)
    wants = [hashlib.sha256() for _ in ranks]
    for call in range(300):
        generator = torch.Generator().manual_seed(call)
        parts = torch.randn(2, call % 7 + 1, 1000 if call % 50 else 100_000, generator=generator)
        halves = list(parts.to(torch.bfloat16 if call % 3 == 0 else torch.float32))
        for rank, want in enumerate(wants):
            for made in (gathered(halves, rank), summed(halves)):
                want.update(made.view(torch.uint8).numpy().tobytes())
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said == [f"{want.hexdigest()}\n" for want in wants]
