"""Tests the number of ranks that the planner chooses for a machine, and that plans and execution refuse the same divisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import ConfigError
from headrace.core.parallelism import AUTO, Parallelism
from headrace.engine.config import NOT_ON_GPUS, EngineConfig
from headrace.engine.layout import CpuMemory, ShapeAsked, ShapeHere, ask_shape, make_need, with_layout
from headrace.engine.shapes import read_here, shape_of
from headrace.lab.plan import here
from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.here import decide_layout
from headrace.lab.plan.shapes import read_shape
from headrace.policy.placement.layout import choose_layout, why_not_run
from headrace.policy.placement.model import ModelShape
from headrace.policy.placement.need import usual_traffic
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.models import read_spec
from headrace.tensor.models.division import check_division

pytestmark = pytest.mark.pure

GB = 10**9
CPU = read_catalogue().device("cpu")
OPTIONS = EngineConfig(model="m", device="cpu", tensor_parallel_size=AUTO).checked()
LARGE = ModelShape(
    name="large",
    num_layers=32,
    hidden_size=4096,
    heads=24,
    kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_positions=4096,
    mlp_size=14336,
)
"""16 bits: 14 GB of weights."""
TINY = replace(LARGE, name="tiny", num_layers=4, hidden_size=64, heads=4, kv_heads=4, head_dim=16, vocab_size=256, mlp_size=128)


def chosen(
    shape: ModelShape, domains: int, num_bytes: int = 200 * GB, replicas: int = 1, refused: dict[str, str] | None = None, **options: Any
) -> int:
    def ask(asked: ShapeAsked) -> ShapeHere:
        assert asked.most > 1, "a machine of one domain leaves no choice, and nothing is read"
        return ShapeHere(shape, "bf16", refused or {})

    found = with_layout(replace(OPTIONS, **options), Path("m"), CPU, CpuMemory(domains, num_bytes), replicas, ask)
    assert isinstance(found.tensor_parallel_size, int)
    assert replace(found, tensor_parallel_size=AUTO) == replace(OPTIONS, **options), "nothing else is decided"
    return found.tensor_parallel_size


def test_a_machine_of_one_domain_has_one_rank_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(LARGE, 1) == chosen(LARGE, 1, 8 * GB) == 1
    assert caplog.messages[0] == (
        "tensor_parallel_size = auto: 1 rank, since this machine has CPU time for one memory domain (NUMA node), "
        "whose memory more ranks would divide"
    )


def test_a_machine_of_several_domains_has_a_rank_in_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(LARGE, 2) == 2
    assert caplog.messages[0].startswith("tensor_parallel_size = auto: 2 ranks, ")
    assert "; TP 1: " in caplog.messages[0]


def test_replicas_share_the_domains() -> None:
    assert [chosen(LARGE, 4, replicas=replicas) for replicas in (1, 2, 3, 4, 9)] == [4, 2, 1, 1, 1]


def test_a_number_of_domains_that_is_no_power_of_two_is_used_where_the_model_divides() -> None:
    sliced = replace(LARGE, kv_heads=24, mlp_size=14208, vocab_size=31998)
    assert (chosen(sliced, 3), chosen(LARGE, 3)) == (3, 2)


def test_sums_cost_a_small_model_more_than_a_second_domain_gives() -> None:
    assert chosen(TINY, 2, max_model_len=64) == 1


def test_a_model_that_one_domain_does_not_hold_is_divided() -> None:
    """Half of the memory is for weights and KV: 14 GB do not fit in 12, and do in 24."""
    few: dict[str, Any] = {"max_model_len": 64}
    slow = replace(CPU, link=replace(CPU.link, latency_s=10.0))
    here_ = ShapeHere(LARGE, "bf16", {})
    found = [with_layout(replace(OPTIONS, **few), Path("m"), slow, CpuMemory(2, size), 1, lambda _: here_) for size in (48 * GB, 200 * GB)]
    assert [each.tensor_parallel_size for each in found] == [2, 1], "although these sums take for ever"


def test_what_execution_refuses_is_not_chosen_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(LARGE, 4, refused={"4": "its groups", "2": "its groups"}) == 1
    assert "TP 2: its groups; TP 4: its groups" in caplog.messages[0]


def test_a_model_that_no_layout_holds_is_left_to_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(LARGE, 2, 4 * GB) == 2
    assert "no number serves it by the planner: weights of" in caplog.messages[0]


def test_a_number_is_left_as_it_is() -> None:
    given = replace(OPTIONS, tensor_parallel_size=3)
    assert decide_layout(given, Path("nothing is read")) is given


QUOTAS = [(None, 4), (2.0, 1), (63.5, 1), (64.0, 2), (100.0, 3), (128.0, 4)]


@pytest.mark.parametrize(("quota", "num_domains"), QUOTAS)
def test_domains_that_the_cpu_quota_does_not_reach_have_no_rank(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, num_domains: int
) -> None:
    """Four domains of 32 CPUs."""
    asked: list[CpuMemory] = []
    monkeypatch.setattr(here, "memory_domains", lambda cpus: [list(range(first, first + 32)) for first in range(0, 128, 32)])
    monkeypatch.setattr(here, "cpu_quota", lambda: quota)
    monkeypatch.setattr(here, "with_layout", lambda config, folder, cpu, memory, num_replicas: asked.append(memory))
    decide_layout(OPTIONS, Path("nothing is read"))
    assert [memory.num_domains for memory in asked] == [num_domains]


def test_this_machine_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "memory_domains", lambda cpus: [[0, 1]])
    assert decide_layout(OPTIONS, Path("nothing is read")).tensor_parallel_size == 1


# -- what divides ----------------------------------------------------------------------------------------------------------------

MODEL = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 12, "head_dim": 16,
         "num_key_value_heads": 4, "max_position_embeddings": 64, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}  # fmt: skip
MIXED = {**MODEL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN = {**MODEL, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "all divide": MODEL,
    "heads": {**MODEL, "num_attention_heads": 6, "num_key_value_heads": 6},
    "one KV head": {**MODEL, "num_key_value_heads": 1},
    "three KV heads": {**MODEL, "num_key_value_heads": 3},
    "features": {**MODEL, "intermediate_size": 50},
    "vocabulary": {**MODEL, "vocab_size": 5},
    "experts' features": {**MIXED, "intermediate_size": 42},
    "unused features": {**QWEN, "intermediate_size": 49, "moe_intermediate_size": 24, "mlp_only_layers": []},
    "dense layers too": {**QWEN, "intermediate_size": 50, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_refuses_the_divisions_that_execution_refuses_in_the_same_words(name: str, tmp_path: Path) -> None:
    config = read_config(written(tmp_path, MODELS[name]))
    spec = read_spec(config)[1]
    shapes = [shape_of(spec, name), *([] if name == "dense layers too" else [read_shape(config, name)])]
    sockets = replace(CPU, link=replace(CPU.link, num_devices=8))
    needs = [replace(make_need(OPTIONS, shape, "bf16", sockets, usual_traffic(64)), num_devices=8) for shape in shapes]
    plans = [(each.layout, each.reason) for need in needs for each in choose_layout(need)]
    assert len(plans) > 6 * len(shapes)
    for layout, reason in plans:
        refused = ""
        try:
            check_division(spec, Parallelism(layout.tp, layout.pp))
        except ConfigError as error:
            refused = error.reason.removeprefix(f"{layout.tp}: ")
        assert refused == (reason if "divide" in reason or "vocabulary" in reason else ""), layout


@pytest.mark.parametrize("gpu", ["cpu", "h100"])
def test_a_layout_that_a_plan_calls_runnable_is_one_that_the_options_may_have(gpu: str) -> None:
    device = read_catalogue().device(gpu)
    need = make_need(OPTIONS, LARGE, "bf16", device, usual_traffic(4096))
    for each in choose_layout(replace(need, num_devices=4, max_stages=None)):
        size: dict[str, Any] = {"tensor_parallel_size": each.layout.tp, "pipeline_parallel_size": each.layout.pp}
        unrun = why_not_run(device, each.layout)
        if "machine" in unrun:
            continue  # one machine's options cannot name another one
        options = replace(OPTIONS, device="cpu" if gpu == "cpu" else "cuda", **size)
        if each.layout.tp > 1 and gpu != "cpu":
            with pytest.raises(ConfigError, match=NOT_ON_GPUS):
                options.checked()
            assert unrun
        else:
            assert options.checked().parallelism.world == each.layout.num_devices
            assert bool(unrun) == (gpu != "cpu" and each.layout.pp > 1), "stages on several GPUs are run where they are asked for by number"


def test_groups_of_rounded_weights_that_do_not_divide_are_refused_as_a_load_refuses_them(tmp_path: Path) -> None:
    folder = written(tmp_path, {**MODEL, "intermediate_size": 160, "num_key_value_heads": 6})
    asked = ShapeAsked(folder=str(folder), quantization="int4", ep=False, most=3)
    found = read_here(asked)
    assert found.shape == replace(shape_of(read_spec(read_config(folder))[1], folder.name), stored=found.shape.stored)
    assert "in groups of 32 of its 160 inputs" in found.refused["2"]
    assert "160 features" in found.refused["3"]
    assert found.dtype == "int4"
    plain = read_here(replace(asked, quantization="none"))
    assert (plain.dtype, [*plain.refused]) == ("bf16", ["3"])
    assert plain.shape.weights_bytes("bf16") > 3 * found.shape.weights_bytes("int4")


@pytest.mark.process
def test_a_model_is_read_in_a_process_of_its_own() -> None:
    folder = bundled_path(DEFAULT_MODEL)
    asked = ShapeAsked(folder=str(folder), quantization="none", ep=False, most=4)
    assert ask_shape(asked) == read_here(asked)
    with pytest.raises(ConfigError, match="tensor_parallel_size: auto cannot be decided: /absent: not a folder"):
        ask_shape(replace(asked, folder="/absent"))
