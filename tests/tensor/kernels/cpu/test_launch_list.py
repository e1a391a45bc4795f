"""Tests many kernels in one region, and steps that are recorded and replayed: always the bits of kernels run one by one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from numba import types

from headrace.core.errors import EngineFatal
from headrace.tensor.host.fresh_memory import poisoned
from headrace.tensor.kernels.cpu import launch_list
from headrace.tensor.kernels.cpu.backend import EXECUTOR, KERNELS
from headrace.tensor.kernels.cpu.integer.quantized import IntegerLinear
from headrace.tensor.kernels.cpu.jit.launch import (
    CALLER,
    address_of,
    allocate_result,
    compile_kernel,
    guarded,
    kernel_names,
    run_now,
    thread_limit,
    words,
)
from headrace.tensor.kernels.cpu.jit.scalars import as_i64, load, store
from headrace.tensor.kernels.cpu.linear import StripLinear
from headrace.tensor.kernels.rounding import Precision, round_weight

pytestmark = pytest.mark.pure


def _block(x: torch.Tensor, layers: list[Any], norm: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """A feed-forward block: each operation needs the one before. residual: zeros."""
    residual = torch.zeros_like(x) if residual is None else residual
    for first, second in layers:
        EXECUTOR.next_layer()
        x = second(KERNELS.gated_activation(first(KERNELS.rms_norm(x, norm, 1e-5, residual=residual)), "silu"))
    return KERNELS.rms_norm(x, norm, 1e-5, residual=residual)


def _layers() -> list[Any]:
    make = (StripLinear.pack, lambda weight, bias: IntegerLinear.pack(round_weight(weight, Precision.INT8), bias))
    return [(make[i % 2](torch.randn(640, 128) * 0.1, None), make[(i + 1) % 2](torch.randn(128, 320) * 0.1, None)) for i in range(4)]


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_deferred_kernels_give_the_same_bits(rows: int) -> None:
    layers, norm, x = _layers(), torch.randn(128), torch.randn(rows, 128)
    with poisoned(is_on=False):
        want = _block(x, layers, norm)
    for _ in range(20):
        with launch_list.deferred_launches():
            got = _block(x, layers, norm)
        assert torch.equal(got, want)


def test_a_list_is_run_early_before_it_holds_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, norm, x = _layers(), torch.randn(128), torch.randn(3, 128)
    want = _block(x, layers, norm)
    monkeypatch.setattr(launch_list, "MAX_RESULT_BYTES", 4000)
    monkeypatch.setattr(type(EXECUTOR), "next_layer", lambda _: None)  # all results take memory of their own
    with launch_list.deferred_launches():
        got = _block(x, layers, norm)
        assert isinstance(CALLER.pending, launch_list.LaunchList)
        assert len(CALLER.pending.entries) < 3 * 10
    assert torch.equal(got, want)


def test_layer_n_reuses_the_buffers_of_layer_n_minus_2() -> None:
    wide, narrow = StripLinear.pack(torch.randn(128, 128), None), StripLinear.pack(torch.randn(64, 128), None)
    x = torch.randn(5, 128)
    wants = [linear(x) for linear in (wide, wide, wide, narrow, narrow, narrow)]
    places, kept = [], []
    with launch_list.deferred_launches():
        for linear, want in zip((wide, wide, wide, narrow, narrow, narrow), wants, strict=True):
            EXECUTOR.next_layer()
            got = linear(x)
            places.append(got.data_ptr())
            assert isinstance(CALLER.pending, launch_list.LaunchList)
            kept.append(CALLER.pending.kept_bytes)
            launch_list.run_pending()
            assert torch.equal(got, want)
    first, second, third, *others = places
    assert (third, first == second) == (first, False)
    assert [count > 0 for count in kept] == [True, True, False, True, True, False]  # what is written over is not counted again
    assert (others[2], others[0] == others[1]) == (others[0], False)
    EXECUTOR.next_layer()  # outside of a list it means nothing
    assert torch.equal(linear(x), wants[-1])


def test_results_may_be_read_after_pending_launches_were_run() -> None:
    layers, norm, x = _layers(), torch.randn(128), torch.randn(2, 128)
    want = _block(x, layers, norm)
    with launch_list.deferred_launches(), launch_list.deferred_launches():  # the inner one joins the outer one
        got = _block(x, layers, norm)
        launch_list.run_pending()
        assert torch.equal(got, want)
    launch_list.run_pending()


def test_nothing_is_run_after_an_exception() -> None:
    x = torch.ones(1, 64)
    residual = torch.zeros_like(x)

    def fail_halfway() -> None:
        with launch_list.deferred_launches():
            KERNELS.rms_norm(x, torch.ones(64), 1e-5, residual=residual)
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert torch.equal(residual, torch.zeros_like(x))
    KERNELS.rms_norm(x, torch.ones(64), 1e-5, residual=residual)
    assert torch.equal(residual, x)


@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_runs_the_list_alone_if_the_other_does_not_start_in_time(first: int) -> None:
    """If one thread takes both workers' turns, the first must not wait for the second for ever."""
    layers, norm, x = _layers(), torch.randn(128), torch.randn(40, 128)
    want = _block(x, layers, norm)
    calls: list[int] = []

    def alone(_: Any, kernel: int, arguments: int, workers: int) -> None:
        function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(kernel)
        for worker in (first, 1 - first):
            function(arguments, worker, 2)
        calls.append(workers)

    with pytest.MonkeyPatch.context() as patch, launch_list.deferred_launches():
        got = _block(x, layers, norm)
        patch.setattr(launch_list, "guarded", alone)
        launch_list.run_pending()
    assert calls
    assert torch.equal(got, want)


_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


def _late(arguments: int, worker: int, workers: int) -> None:
    """Worker 1 sleeps for arguments[0] microseconds; worker 0 writes the number of workers to arguments[1]."""
    if worker == 1:
        _usleep(load(as_i64(arguments), 0))
    else:
        store(workers, as_i64(arguments), 1)


def test_a_worker_that_is_late_at_a_barrier_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if thread_limit() == 1:
        pytest.skip("one CPU: no worker waits")
    kernel, late, none = compile_kernel(_late), words([300_000, 0]), words([0, 0])
    entries = words([kernel, address_of(none), 2, kernel, address_of(late), 2, kernel, address_of(none), 2])
    launch_list.run_list(entries, 2)
    late[0] = 1_000_000

    def run_until_both_start() -> None:
        """On a busy machine a worker may start too late; then the other one runs the list by itself."""
        while True:
            launch_list.run_list(entries, 2)
            assert late[1] == 1, "both workers started, and the list ended without an error"

    with monkeypatch.context() as patch:
        patch.setattr(launch_list, "MAX_WAIT_S", 0.02)
        with pytest.raises(EngineFatal, match=r"waited 0.02 s for one of them"):
            run_until_both_start()
    launch_list.run_list(words([kernel, address_of(none), 2] * 3), 2)


def _add_waits(arguments: int, worker: int, workers: int) -> None:
    """arguments: how many looks at the clock, what they said, and a place for what has been waited."""
    looks = as_i64(arguments)
    count, last, waited = load(looks, 0), 0, 0
    for i in range(count):
        now = load(looks, 1 + i)
        waited, last = launch_list.waited_more(waited, last, now), now
    store(waited, looks, 1 + count)


def test_time_in_which_the_process_was_stopped_is_no_waiting() -> None:
    begin, second = 5_000_000_000, 1_000_000_000
    looks = [begin, begin + second // 4, begin + 90 * second, begin + 90 * second + second // 2]
    memory = words([len(looks), *looks, -1])
    guarded(run_now, compile_kernel(_add_waits), address_of(memory), 1)
    assert memory[-1] == second // 4 + second + second // 2


def test_memory_that_is_read_before_it_is_written_is_seen() -> None:
    """By results that are numbers only by chance: also in a layer that reuses the buffers of another, and in replays."""
    linear, x = StripLinear.pack(torch.randn(128, 128), None), torch.randn(2, 128)
    assert allocate_result((3,), torch.float32).isnan().all()
    assert allocate_result((3,), torch.bfloat16).isnan().all()
    assert allocate_result((3,), torch.int32).tolist() == [-1] * 3
    with launch_list.recording() as recorded:
        for _ in range(3):
            EXECUTOR.next_layer()
            made = linear(x)
            unwritten = allocate_result((4,), torch.float32)
    assert recorded.is_whole
    for _ in range(2):
        assert not made.isnan().any()
        assert unwritten.isnan().all()
        made.fill_(1.0)
        unwritten.fill_(1.0)
        assert recorded.replay()


# --- recording ---


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_recorded_step_is_replayed_over_new_values(rows: int) -> None:
    layers, norm, x, residual = _layers(), torch.randn(128), torch.randn(rows, 128), torch.zeros(rows, 128)
    with launch_list.recording() as recorded:
        got = _block(x, layers, norm, residual)
    assert recorded.is_whole
    assert torch.equal(got, _block(x, layers, norm))
    for seed in range(20):
        x.copy_(torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)))
        residual.zero_()
        got.fill_(7.0)
        assert recorded.replay()
        assert torch.equal(got, _block(x, layers, norm))


def test_one_kernel_of_a_recorded_step_can_be_run_alone_and_has_a_name() -> None:
    x, norm, linear = torch.randn(3, 128), torch.randn(128), StripLinear.pack(torch.randn(640, 128) * 0.1, None)
    with poisoned(is_on=False), launch_list.recording() as recorded:
        normed = KERNELS.rms_norm(x, norm, 1e-5)
        multiplied = linear(normed)
    want = normed.clone(), multiplied.clone()
    kernels = list(dict.fromkeys(recorded.entries[::3]))
    first, last = kernels[0], kernels[-1]
    names = kernel_names()
    assert names[first].startswith("elementwise.")
    assert names[last].startswith("linear.")

    def run_alone(kernel: int) -> None:
        recorded.reset_counters()  # products count what is left to do
        launch_list.run_list(recorded.entries_of(kernel), recorded.workers)

    normed.fill_(0.0)
    multiplied.fill_(9.0)
    run_alone(first)
    assert torch.equal(normed, want[0])
    assert torch.all(multiplied == 9.0)
    for _ in range(2):
        multiplied.fill_(9.0)
        for kernel in kernels[1:]:
            run_alone(kernel)
        assert torch.equal(multiplied, want[1])


@pytest.mark.parametrize("recorded_at", [1300, 200])
def test_a_recorded_steps_attention_is_planned_for_the_new_lengths(paged_batch: Any, recorded_at: int) -> None:
    """Also where several workers share a context, by more and by fewer parts, where none does any more, and where the first does. A step of
    fewer tokens needs another list: then it says so, and runs nothing."""
    if thread_limit() == 1:
        pytest.skip("one CPU: nothing is shared")
    batch = paged_batch([(1, 3000)], heads=3, kv_heads=1, head_dim=32)

    def attend(length: int) -> torch.Tensor:
        batch.context_lens.fill_(length)
        seen: torch.Tensor = batch.attend(KERNELS)
        return seen

    with launch_list.recording() as recorded:
        got = attend(recorded_at)
    for length in (2000, 3000, 512, 600, 1, 511, 513, 40, 1300):
        want = attend(length)
        got.fill_(7.0)
        assert recorded.replay(), length
        assert torch.equal(got, want), length
    got.fill_(7.0)
    batch.row_starts.fill_(0)
    assert not recorded.replay()
    assert torch.all(got == 7.0)


def test_a_recording_whose_results_were_read_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, norm, x = _layers(), torch.randn(128), torch.randn(2, 128)
    want = _block(x, layers, norm)
    with launch_list.recording() as recorded:
        got = _block(x, layers[:2], norm)
        launch_list.run_pending()
        got = _block(x, layers, norm)
    assert not recorded.is_whole
    assert torch.equal(got, want)
    monkeypatch.setattr(launch_list, "MAX_RESULT_BYTES", 4000)
    with launch_list.recording() as recorded:
        got = _block(x, layers, norm)
    assert not recorded.is_whole
    assert torch.equal(got, want)


def test_recordings_are_not_nested() -> None:
    with launch_list.deferred_launches(), pytest.raises(RuntimeError, match="already"), launch_list.recording():
        pass
    assert CALLER.pending is None
