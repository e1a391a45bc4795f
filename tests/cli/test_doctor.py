"""Tests doctor's findings on machines made up by hand, and the command on this one."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.cli.doctor import Health
from headrace.machine.gpus import Gpus, unusable
from headrace.machine.resources import Available
from headrace.tensor.device import Cuda
from headrace.tensor.host.cpu_features import CpuFeatures, parse_cpu_flags
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure

CPUINFO = "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f avx512_vnni\n"


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python asks a program for it."""
    monkeypatch.setattr("platform.processor", lambda: "x86_64")


def test_python_built_without_its_profile_is_warned_about() -> None:
    assert doctor.check_python("'--enable-shared' '--enable-optimizations' '--with-lto'").health is Health.OK
    assert doctor.check_python(None).health is Health.OK
    warned = doctor.check_python("'--prefix=/opt/python' '--enable-shared'")
    assert warned.health is Health.WARN
    assert "distribution's Python" in warned.remedy


def test_cpu_features_are_named_with_their_use() -> None:
    found = doctor.check_cpu(CPUINFO)
    assert found.health is Health.OK
    assert "Some CPU: avx2, avx512f, avx512_vnni" in found.found
    assert "without avx512_bf16 (bfloat16 GEMM" in found.found
    assert doctor.check_cpu("flags : fpu sse2").health is Health.WARN
    assert doctor.check_cpu("Features : fp asimd").health is Health.OK


@pytest.mark.parametrize("flags", ["fpu sse2", "avx2", "avx2 avx512f", "avx2 avx512f avx512_bf16", "asimd bf16", "fpu avx512_bf16"])
def test_what_the_cpu_can_do_is_read_as_the_kernels_read_it(flags: str) -> None:
    """The flags were parsed here a second time, with other rules."""
    features = CpuFeatures("x86_64", parse_cpu_flags(f"flags\t\t: {flags}\n"))
    found = doctor.check_cpu(f"flags\t\t: {flags}\n")
    assert found.found.endswith(f"kernels choose as for {features.family}")
    assert (found.health is Health.OK) == (features.family != "generic")


def test_a_gpu_is_there_or_the_reason_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_gpus(Gpus()).health is Health.OK
    found = doctor.check_gpus(unusable("this torch is a build without CUDA", "Install a torch with CUDA"))
    assert (found.health, found.found) == (Health.WARN, "this torch is a build without CUDA")
    assert found.remedy.startswith("Install a torch with CUDA, or use device = cpu. Until then models run on the CPU")
    monkeypatch.setattr(Cuda, "title", "NVIDIA H100")
    monkeypatch.setattr(Cuda, "free_memory", lambda device: Available(70 << 30, "the GPU"))
    works = doctor.check_gpus(Gpus(("0", "1")))
    assert (works.health, works.found) == (Health.OK, "2 x NVIDIA H100, 70.0 GiB free on the first")


def test_a_cpu_that_says_nothing_is_warned_about() -> None:
    assert doctor.check_cpu("").health is Health.WARN


def test_memory_is_what_an_engine_could_take(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {8 << 20} kB\n")
    found = doctor.check_memory(tmp_path)
    assert (found.health, found.found) == (Health.OK, "8.0 GiB to be had (bound by MemAvailable)")
    (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {1 << 20} kB\n")
    assert doctor.check_memory(tmp_path).health is Health.WARN
    unknown = doctor.check_memory(tmp_path / "absent")
    assert unknown.health is Health.WARN
    assert "what is free is not measured there" in unknown.found


def test_allowed_cpus_are_not_guessed_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    found = doctor.check_threads(None, {}).found
    assert found == f"{os.cpu_count()} CPUs, which of them are allowed is not measured here"


def test_passive_waiting_is_warned_about() -> None:
    assert doctor.check_threads(None, {}).health is Health.OK
    warned = doctor.check_threads(1.5, {"OMP_WAIT_POLICY": "passive"})
    assert warned.health is Health.WARN
    assert "cgroup quota 1.5" in warned.found


def test_few_open_files_come_with_the_command_that_helps() -> None:
    assert doctor.check_files(65536, 65536).health is Health.OK
    assert doctor.check_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).health is Health.OK
    assert "ulimit -n 4096" in doctor.check_files(1024, 4096).remedy


@pytest.mark.socket
def test_taken_port_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = doctor.check_port(taken.getsockname()[1])
    assert found.health is Health.WARN
    assert "--port" in found.remedy


def test_cache_that_others_can_write_is_a_failure(tmp_path: Path) -> None:
    assert doctor.check_cache(tmp_path / "not" / "yet").health is Health.OK
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert doctor.check_cache(shared).health is Health.FAIL


def test_versions_out_of_range_fail_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["typer>=999", "absent-thing>=1", "pytest; extra == 'dev'"])
    typer, absent = doctor.check_versions()
    assert (typer.health, typer.remedy) == (Health.FAIL, "pip install 'typer>=999'")
    assert (absent.health, absent.found) == (Health.FAIL, "not installed")


@pytest.mark.socket
def test_doctor_exits_by_its_worst_finding(headrace: Headrace) -> None:
    done = headrace("doctor", "--json", "--port", "0")
    findings = json.loads(done.stdout)
    names = [finding["name"] for finding in findings]
    assert {"python", "cpu", "threads", "memory", "threading layer", "open files", "port", "cache", "torch"} <= set(names)
    assert done.returncode == int(any(finding["health"] == "FAIL" for finding in findings))
