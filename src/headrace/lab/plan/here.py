"""Asks the planner for the layout of engines on this machine."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from headrace.core.parallelism import AUTO
from headrace.engine.config import EngineConfig
from headrace.engine.layout import CpuMemory, with_layout
from headrace.machine.resources import allowed_cpus, cpu_quota, machine_bytes, memory_domains


def decide_layout(config: EngineConfig, folder: Path, num_replicas: int = 1) -> EngineConfig:
    """Where `tensor_parallel_size` is auto. num_replicas: of all models that this machine serves. Raises ConfigError."""
    if config.tensor_parallel_size != AUTO:
        return config
    from headrace.lab.plan.catalogue import read_catalogue  # offline runs that decide nothing have no use for it

    memory = CpuMemory(_num_domains(), machine_bytes())
    return with_layout(config, folder, read_catalogue().device("cpu"), memory, num_replicas)


def _num_domains() -> int:
    """Domains that the cgroup's quota does not reach are left out, as threads follow it too (`tensor.host.threads`)."""
    quota = cpu_quota()
    sizes = accumulate(len(domain) for domain in memory_domains(allowed_cpus() or ()))
    return max(1, sum(quota is None or num_cpus <= quota for num_cpus in sizes))
