"""Tests options of an engine that decide a simulated replica's memory and speed: each changes what comes out, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.layout import make_need
from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.shapes import find_entry
from headrace.lab.simulate.build import MEASURED, SimulatedModel, check_measured, measured_model, on_device, planned_model
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.placement.layout import Placement, choose_layout
from headrace.policy.placement.need import Traffic

pytestmark = pytest.mark.pure

KNOWN = read_catalogue()
TRAFFIC = Traffic(prompt_tokens=512, output_tokens=128, counts_prompts=True)


def planned(tp: int | None = None, *, name: str = "llama-3-8b", gpu: str = "h100", **options: Any) -> tuple[SimulatedModel, Placement]:
    """options: those that a file names"""
    config = on_device(EngineConfig(model=name, **options).checked(), options, gpu)
    shape, dtype = find_entry(name, KNOWN.models)
    return planned_model(config, make_need(config, shape, dtype, KNOWN.device(gpu), TRAFFIC), tp)


def blocks(**options: Any) -> int:
    return planned(1, **options)[0].num_blocks


def decode_s(**options: Any) -> float:
    return planned(1, **options)[0].latency.decode_s(16, 1000)


REFUSED = [
    ("cpu", "pipeline_parallel_size", 2, "2 is not simulated: stages compute"),
    ("h100", "pipeline_parallel_size", 2, "2 is not simulated: stages compute"),
    ("h100", "tensor_parallel_size", 2, "2 is more than 1: no layer is divided over GPUs"),
    ("cpu", "tensor_parallel_size", 4, "cpu has no layout of 4 devices"),
]


@pytest.mark.parametrize(("gpu", "name", "size", "reason"), REFUSED)
def test_ranks_of_a_file_that_cannot_be_simulated_are_refused_by_name(gpu: str, name: str, size: int, reason: str) -> None:
    options: dict[str, Any] = {name: size}
    with pytest.raises(ConfigError, match=f"^{name}: {reason}"):
        planned(gpu=gpu, **options)


def test_ranks_of_cpus_have_the_times_and_the_memory_of_as_many_domains() -> None:
    alone, _ = planned(gpu="cpu", name="qwen2.5-0.5b")
    divided, best = planned(gpu="cpu", name="qwen2.5-0.5b", tensor_parallel_size=2)
    assert best.layout.tp == divided.config.tensor_parallel_size == 2
    assert divided.num_blocks > alone.num_blocks
    assert divided.latency.decode_s(16, 1000) < alone.latency.decode_s(16, 1000)


def test_auto_is_what_the_planner_chooses_and_a_number_is_not() -> None:
    """In 16 bits this model does not fit half of a domain's memory, and does fit two halves."""
    simulated, best = planned(gpu="cpu", tensor_parallel_size="auto")
    assert (best.layout.tp, simulated.config.tensor_parallel_size) == (2, 2)
    with pytest.raises(ConfigError, match=r"^--gpu: weights of 16\.1 GB do not fit in 12\.0 GB"):
        planned(gpu="cpu")
    assert planned(gpu="cpu", name="qwen2.5-0.5b", tensor_parallel_size="auto")[1].layout.tp == 1
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: auto may be more than 1: no layer is divided over GPUs\."):
        planned(tensor_parallel_size="auto")


def test_rounded_weights_leave_more_cache_and_are_read_sooner() -> None:
    assert blocks(quantization="int4") > blocks(quantization="int8") > blocks()
    assert decode_s(quantization="int8") < decode_s()


def test_wide_weights_leave_less_cache_and_are_read_later() -> None:
    assert blocks(dtype="float32") < blocks(dtype="bfloat16") == blocks()
    assert decode_s(dtype="float32") > decode_s()


def test_a_checkpoint_of_small_weights_keeps_them_whatever_is_computed_with() -> None:
    shape, _ = find_entry("llama-3-8b", KNOWN.models)
    config = EngineConfig(model="m", dtype="bfloat16").checked()
    assert make_need(config, shape, "int4", KNOWN.device("h100"), TRAFFIC).dtype == "int4"


def test_a_cache_of_small_numbers_holds_twice_the_tokens() -> None:
    assert blocks(kv_cache_dtype="int8") == pytest.approx(2 * blocks(), rel=0.001)
    assert decode_s(kv_cache_dtype="int8") < decode_s()
    assert blocks(kv_cache_dtype="bfloat16") == blocks()


def test_a_smaller_share_of_memory_leaves_less_cache() -> None:
    assert blocks(memory_fraction=0.5) < blocks(memory_fraction=0.9) == blocks()


def test_bytes_of_the_cache_are_counted_in_blocks() -> None:
    assert blocks(kv_cache_bytes=10 * 131_072 * 16) == 10, "a token of this model has 128 KiB"
    assert blocks(kv_cache_bytes=10 * 131_072 * 16, kv_cache_dtype="int8") > 15
    assert blocks(memory_bytes=34 << 30) - blocks(memory_bytes=32 << 30) == pytest.approx((2 << 30) / (131_072 * 16), abs=2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_kv_blocks": 1_000_000}, "num_kv_blocks: 1,000,000 do not fit: TP 1 h100 holds 4"),
        ({"kv_cache_bytes": 10**12}, "kv_cache_bytes: 1,000,000,000,000 do not fit"),
        ({"num_kv_blocks": 1}, "num_kv_blocks: 1 block(s) of 16 tokens hold nothing"),
        ({"kv_cache_bytes": 100}, "num_kv_blocks: 0 block(s) of 16 tokens hold nothing"),
        ({"block_size": 2**20}, "num_kv_blocks: 0 block(s) of 1,048,576 tokens hold nothing"),
        ({"num_kv_blocks": 100, "max_model_len": 8192}, "max_model_len: 8,192 tokens do not fit the KV cache, which holds 1,584"),
        ({"device": "cpu"}, "device: cpu is not what --gpu h100 simulates"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens: 32 is less than max_num_seqs"),
    ],
)
def test_what_a_device_cannot_have_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(1, **options)
    assert named in str(refused.value)


def test_a_named_cache_takes_a_replica_that_holds_it() -> None:
    wanted = 8_000_000_000_000 // 131_072 // 16 // 50
    with pytest.raises(ConfigError, match="num_kv_blocks: 76,293 do not fit: TP 1 h100 holds 487,819 tokens of KV, 30,488 blocks"):
        planned(num_kv_blocks=wanted)
    simulated, best = planned(4, num_kv_blocks=wanted)
    assert simulated.num_blocks == wanted
    assert best.layout.tp == 4


def test_a_gpu_has_defaults_of_its_own_where_the_file_names_none() -> None:
    def limits(gpu: str = "h100", **options: Any) -> tuple[int, int, float]:
        config = on_device(EngineConfig(model="m", **options).checked(), options, gpu)
        return config.max_num_seqs, config.max_num_batched_tokens, config.memory_fraction

    own = EngineConfig(model="m").checked()
    assert limits("cpu") == (own.max_num_seqs, own.max_num_batched_tokens, own.memory_fraction)
    assert limits() == (256, 8192, 0.9)
    assert limits(max_num_seqs=64, memory_fraction=0.5) == (64, 8192, 0.5)
    assert limits(max_num_seqs=4096) == (4096, 8192, 0.9)
    assert limits(max_num_batched_tokens=128) == (128, 128, 0.9)


def test_a_replica_is_the_one_that_the_planner_prefers() -> None:
    shape, dtype = find_entry("llama-3-8b", KNOWN.models)
    config = on_device(EngineConfig(model="llama-3-8b").checked(), (), "h100")
    chosen = choose_layout(make_need(config, shape, dtype, KNOWN.device("h100"), TRAFFIC))[0]
    assert planned()[1] == chosen


def test_heads_that_devices_cannot_share_are_refused_as_the_planner_refuses_them() -> None:
    with pytest.raises(ConfigError, match="--tp: 4: 14 query heads do not divide by it"):
        planned(4, name="qwen2.5-0.5b")


DIFFERENT: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "enable_expert_parallel": True,
    "dtype": "float32",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "block_size": 32,
    "memory_fraction": 0.7,
    "kv_cache_bytes": 1 << 30,
    "memory_bytes": 1 << 30,
    "device": "cuda",
    "kernels": "reference",
    "deterministic": True,
    "enforce_eager": True,
    "num_threads": 3,
}


def test_every_measured_option_is_tried() -> None:
    assert set(DIFFERENT) == set(MEASURED)


@pytest.mark.parametrize("name", MEASURED)
def test_steps_of_another_value_of_an_option_are_refused(name: str) -> None:
    measured = EngineConfig(model="m").checked()
    check_measured(replace(measured, max_num_seqs=2), measured)
    with pytest.raises(ConfigError) as refused:
        check_measured(replace(measured, **{name: DIFFERENT[name]}), measured)
    assert str(refused.value).startswith(f"{name}: ")


def test_measured_steps_keep_their_blocks_where_the_file_names_none() -> None:
    latency = FittedLatency(step_s=0.01, row_s=0, context_s=0, prompt_s=0, attention_s=0)
    shape, _ = find_entry("qwen2.5-0.5b", KNOWN.models)
    assert measured_model(EngineConfig(model="m").checked(), latency, shape, 500).num_blocks == 500
    assert measured_model(EngineConfig(model="m", num_kv_blocks=40).checked(), latency, shape, 500).num_blocks == 40
    with pytest.raises(ConfigError, match=r"1 block\(s\) of 16 tokens hold nothing"):
        measured_model(EngineConfig(model="m", num_kv_blocks=1).checked(), latency, shape, 500)
