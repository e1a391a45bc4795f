"""Tests the keywords of `LLM`: honoured, refused by name, or corrected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from headrace import LLM, SamplingParams
from headrace.bundled import bundled_path
from headrace.cli.flags.vllm import translated
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.option import options
from headrace.core.speculation import SpeculativeConfig
from headrace.core.vllm_options import WITHOUT_EFFECT
from headrace.engine.config import EngineConfig
from headrace.lab.plan import here
from headrace.llm import api
from headrace.llm.options import ENGINE_FIELDS, ONLY, engine_config

pytestmark = pytest.mark.pure


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Configurations that LLM asked to build an engine of; building itself ends there."""
    seen: list[EngineConfig] = []

    def build(config: EngineConfig, outbox: object) -> Any:
        seen.append(config)
        raise ConfigError("built", "enough")

    monkeypatch.setattr(api, "_build_engine", build)
    return seen


def test_vllms_names_reach_the_engines_configuration(built: list[EngineConfig], model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="enough"):
        LLM(
            str(model_folder),
            dtype="float",
            kv_cache_dtype="bfloat16",
            load_format="dummy",
            max_model_len=512,
            max_num_seqs=3,
            max_num_batched_tokens=48,
            block_size=8,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            gpu_memory_utilization=0.25,
            num_gpu_blocks_override=99,
            kv_cache_memory_bytes=2**20,
            scheduling_policy="sjf",
            seed=11,
            kernels="reference",
            num_threads=1,
            device="cpu",
            depth=2,
            enable_lora=True,
            max_loras=3,
            max_cpu_loras=6,
            max_lora_rank=8,
            speculative_config={"method": "draft_model", "model": "headrace-draft", "num_speculative_tokens": 4},
        )
    assert built == [
        EngineConfig(
            model=str(model_folder),
            dtype="float32",
            kv_cache_dtype="bfloat16",
            load_format="dummy",
            max_model_len=512,
            max_num_seqs=3,
            max_num_batched_tokens=48,
            block_size=8,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            memory_fraction=0.25,
            num_kv_blocks=99,
            kv_cache_bytes=2**20,
            queue_policy="sjf",
            seed=11,
            kernels="reference",
            num_threads=1,
            device="cpu",
            depth=2,
            enable_lora=True,
            max_loras=3,
            max_cpu_loras=6,
            max_lora_rank=8,
            speculative_config=SpeculativeConfig(method="draft_model", model=str(bundled_path("headrace-draft")), num_speculative_tokens=4),
        )
    ]


def test_the_signature_has_every_option_of_the_engine_with_its_type() -> None:
    """It is written out for editors; `EngineConfig` is what it is held against. Options without a flag are for servers alone."""
    hints, signature = get_type_hints(EngineConfig), get_type_hints(LLM.__init__)
    described = dict(options(EngineConfig))
    offered = {keyword: hints[field] for keyword, field in ENGINE_FIELDS.items() if described[field].flags != ()}
    assert {*offered, "experimental"} == api._KEYWORDS
    offered["speculative_config"] = Mapping[str, object]  # vLLM's form
    assert [keyword for keyword, hint in offered.items() if signature[keyword] not in (hint, hint | None)] == []


def test_every_keyword_changes_the_configuration(model_folder: Path) -> None:
    changed = {
        "dtype": "float32",
        "load_format": "dummy",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "gpu_memory_utilization": 1,
        "scheduling_policy": "fair",
        "kernels": "reference",
        "deterministic": True,
        "enforce_eager": True,
        "device": "cuda",
        "depth": 2,
        "max_num_batched_tokens": 77,
        "enable_lora": True,
        "enable_expert_parallel": True,
        "max_cpu_loras": 77,
    }
    changed |= dict.fromkeys(["max_model_len", "max_num_seqs", "block_size", "num_gpu_blocks_override", "num_threads", "seed"], 7)
    changed |= dict.fromkeys(["max_loras", "max_lora_rank", "tensor_parallel_size", "pipeline_parallel_size"], 7)
    changed |= {"kv_cache_memory_bytes": 2**20, "speculative_config": {"method": "suffix"}}
    assert {*changed, "experimental"} == api._KEYWORDS
    plain = {"dtype": "auto", "device": "cpu"}
    for name, value in changed.items():
        assert engine_config(model_folder, plain | {name: value}) != engine_config(model_folder, plain), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "512"),
        ("max_model_len", 0),
        ("max_num_seqs", 2.5),
        ("max_num_seqs", True),
        ("enable_prefix_caching", 1),
        ("gpu_memory_utilization", 1.5),
        ("dtype", "int8"),
        ("dtype", 5),
        ("load_format", "pt"),
        ("scheduling_policy", "lottery"),
        ("seed", "x"),
    ],
)
def test_values_that_break_a_rule_are_refused_by_name(built: list[EngineConfig], model_folder: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model_folder, **{name: value})
    assert caught.value.where == name
    assert built == []


def test_help_of_the_class_has_every_option_of_the_engine() -> None:
    for keyword in api._KEYWORDS:
        assert f"\n    {keyword} " in (LLM.__doc__ or ""), keyword


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("max_modellen", "max_model_len"), ("tensor_parallel", "tensor_parallel_size"), ("max_num_seq", "max_num_seqs")],
)
def test_unknown_keywords_are_refused_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean {suggestion}"):
        LLM(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Known: "):
        LLM(zzzzzz=1)


def test_no_keyword_is_suggested_that_is_then_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data_parallel_size: 2 is not supported; only 1 is"):
        LLM(data_parallel=2)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"method": "eagle"}, "speculative_config.method"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "speculative_config.disable_by_batch_size"),
        ({"method": "draft_model", "model": "./no-folder"}, "speculative_config.model"),
        ("ngram", "speculative_config"),
    ],
)
def test_a_key_of_speculation_is_refused_by_its_name(built: list[EngineConfig], model_folder: Path, given: Any, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model_folder, device="cpu", speculative_config=given)
    assert caught.value.where == where
    assert built == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_model", "org/draft"),
        ("num_speculative_tokens", 5),
        ("data_parallel_size", 2),
        ("tensor_parallel_size", 65),
        ("tensor_parallel_size", "two"),
        ("tensor_parallel_size", True),
        ("pipeline_parallel_size", 0),
        ("quantization", "awq"),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8"),
        ("trust_remote_code", True),
        ("tokenizer", "other"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**{name: value})
    assert caught.value.where == name


def test_auto_is_decided_for_this_machine(built: list[EngineConfig], model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "memory_domains", lambda cpus: [[0, 1]])
    with pytest.raises(ConfigError, match="enough"):
        LLM(model_folder, device="cpu", tensor_parallel_size="auto")
    assert [config.tensor_parallel_size for config in built] == [1]


def test_values_that_ask_for_what_happens_anyway_are_accepted(built: list[EngineConfig], model_folder: Path) -> None:
    for name, (accepted, _) in ONLY.items():
        for value in accepted:
            with pytest.raises(ConfigError, match="enough"):
                LLM(model_folder, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_keyword_without_effect_gives_the_notice_of_the_flag(
    name: str, built: list[EngineConfig], model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The keyword said nothing where the flag said that it changes nothing."""
    value = 7 if name != "disable_log_stats" else "yes"
    for given in (None, False, value):
        with pytest.raises(ConfigError, match="enough"):
            LLM(model_folder, **{name: given})  # type: ignore[arg-type]
    notices = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert notices == [f"{name}={value!r} has no effect: {WITHOUT_EFFECT[name]}."]
    [flag_notice] = translated([f"--{name.replace('_', '-')}", "7"])[1]
    assert f"has no effect: {WITHOUT_EFFECT[name]}" in flag_notice


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        LLM(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(tmp_path)


def test_bundled_models_are_looked_up_by_name() -> None:
    from headrace.bundled import bundled_names, bundled_path

    for name in bundled_names():
        found = bundled_path(name)
        assert found is not None
        assert (found / "config.json").is_file()
    for name in ("..", "", "/etc", "headrace-tiny/../headrace-tiny", "nothing"):
        assert bundled_path(name) is None


def test_the_package_exports_this_class() -> None:
    assert LLM is api.LLM
    assert SamplingParams(max_tokens=3).max_tokens == 3


@pytest.mark.process
def test_importing_the_api_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from headrace import LLM; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("keyword", "value"), [("gpu_memory_utilization", 2.0), ("num_gpu_blocks_override", 0), ("scheduling_policy", "best")]
)
def test_errors_name_the_keyword_that_was_given(model_folder: Path, keyword: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model_folder, **{keyword: value})
    assert caught.value.where == keyword


def test_what_was_never_run_has_to_be_asked_for(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="experimental=True") as hub:
        LLM("somebody/some-model")
    assert hub.value.where == "model"
