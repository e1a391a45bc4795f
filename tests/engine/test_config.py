"""Tests the options that a replica may have, from a file, flags or the supervisor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode, plain
from headrace.engine import config as engine_config
from headrace.engine.config import EngineConfig, find_gpus_to_start, resolve
from headrace.machine.gpus import Gpus, unusable

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", float("nan")),
        ("max_waiting", -3.0),
        ("block_size", "16"),
        ("block_size", True),
        ("depth", 1.5),
        ("max_num_seqs", 0),
        ("tensor_parallel_size", "2"),
        ("tensor_parallel_size", True),
        ("tensor_parallel_size", 65),
    ],
)
def test_a_value_outside_its_bounds_or_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value}).checked()


@pytest.mark.parametrize(
    ("gpus", "device", "defaults"), [(Gpus(("0",)), "cuda", (256, 8192, 0.9, 2)), (Gpus(problem="no driver"), "cpu", (64, 512, 0.5, 1))]
)
def test_auto_takes_a_gpu_that_works_and_its_defaults(gpus: Gpus, device: str, defaults: tuple[int, int, float, int]) -> None:
    for config in (EngineConfig(model="m").checked(lambda: gpus), resolve(EngineConfig(model="m"), device)):
        assert config.device == device
        assert (config.max_num_seqs, config.max_num_batched_tokens, config.memory_fraction, config.depth) == defaults
    assert decode(EngineConfig, {"model": "m", "max_num_seqs": 5, "depth": 1}).checked(lambda: gpus).device == device


def test_a_command_that_starts_engines_takes_the_cpu_where_the_first_kernel_fails_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_config, "find_working_gpus", lambda: unusable("gcc fails", "Mend it"))
    find_gpus_to_start.cache_clear()
    for _ in range(2):
        config = EngineConfig(model="m").checked(find_gpus_to_start)
        assert (config.device, config.max_num_seqs, config.memory_fraction, config.depth) == ("cpu", 64, 0.5, 1)
    assert caplog.messages == ["device = auto takes the CPU: gcc fails. Mend it, or use device = cpu."]
    assert EngineConfig(model="m", device="cuda").checked(find_gpus_to_start).device == "cuda", (
        "what is insisted on is refused by the engine"
    )
    monkeypatch.setattr(engine_config, "find_working_gpus", lambda: Gpus(("0",)))
    find_gpus_to_start.cache_clear()
    config = EngineConfig(model="m").checked(find_gpus_to_start)
    assert (config.device, config.depth) == ("cuda", 2)
    find_gpus_to_start.cache_clear()


def test_of_steps_and_sequences_the_one_that_is_not_set_fits_the_other() -> None:
    assert EngineConfig(model="m", device="cpu", max_num_seqs=600).checked().max_num_batched_tokens == 600
    assert EngineConfig(model="m", device="cpu", max_num_batched_tokens=20).checked().max_num_seqs == 20
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineConfig(model="m", max_num_batched_tokens=20, max_num_seqs=21).checked()


def test_what_a_configuration_says_is_read_again_as_it_is() -> None:
    for device in ("cpu", "cuda"):
        config = EngineConfig(model="m", device=device, max_num_seqs=7).checked()
        assert decode(EngineConfig, plain(config)) == config


@pytest.mark.parametrize(("name", "remedy"), [("bitsandbytes", "Use the model's 16-bit weights"), ("rtn", "Use int8")])
def test_a_quantization_of_vllms_that_is_not_here_names_what_to_do_instead(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not supported.*{remedy}"):
        EngineConfig(model="m", quantization=name).checked()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_layer_on_two_gpus_is_refused_with_what_uses_both(device: str) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 is more than 1: no layer .* GPUs\. Use 1, with pipeline_parallel_size"):
        EngineConfig(model="m", device=device, tensor_parallel_size=2).checked(lambda: Gpus(("0", "1")))


def test_stages_may_be_on_gpus_without_adapters() -> None:
    staged = EngineConfig(model="m", device="cuda", pipeline_parallel_size=2)
    assert staged.checked().depth == 1
    with pytest.raises(ConfigError, match="enable_lora: is not supported on several GPUs"):
        replace(staged, enable_lora=True).checked()
