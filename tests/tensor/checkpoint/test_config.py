"""Tests config.json and generation_config.json: what is honoured, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, MistralConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.core.errors import CheckpointError, ConfigError
from headrace.tensor.layers.rope import LinearScaling, RopeSpec
from headrace.tensor.models import ARCHITECTURES, MODEL_TYPES, describe

pytestmark = pytest.mark.pure

DELETED = object()


def change(folder: Any, **fields: object) -> None:
    folder.config = {k: v for k, v in {**folder.config, **fields}.items() if v is not DELETED}
    folder.write_config()


def refusal(folder: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        folder.load(load_format="dummy")
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", DELETED),
        ("hidden_size", 10**18),
        ("hidden_size", 7),
        ("hidden_size", None),
        ("vocab_size", 2**40),
        ("intermediate_size", -6),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 5),
        ("head_dim", 10**6),
        ("max_position_embeddings", 10**12),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("hidden_act", "gelu"),
        ("hidden_act", ["silu"]),
        ("attention_bias", 1),
        ("tie_word_embeddings", "no"),
        ("dtype", "float8_e4m3fn"),
        ("dtype", 16),
        ("quantization_config", {"quant_method": "gptq"}),
        ("compression_config", {"format": "int-quantized"}),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("architectures", []),
        ("architectures", DELETED),
        ("architectures", "LlamaForCausalLM"),
        ("eos_token_id", 13),
        ("eos_token_id", -1),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", True),
        ("eos_token_id", list(range(13)) * 9),
        ("rope_theta", -1.0),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("partial_rotary_factor", 0.5),
    ],
)  # fmt: skip
def test_a_field_that_breaks_a_rule_is_named(folder: Any, field: str, value: object) -> None:
    change(folder, **{field: value})
    error = refusal(folder)
    assert error.file.endswith("config.json")
    assert field in error.reason or (field == "hidden_size" and "num_attention_heads" in error.reason)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "os.system", "../llama", 7, None, "Llama\0ForCausalLM", "x" * 10_000])
def test_an_unknown_architecture_names_the_supported_ones(folder: Any, name: object) -> None:
    change(folder, architectures=[name])
    error = refusal(folder)
    assert "LlamaForCausalLM" in error.remedy
    assert len(error.reason) < 200


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("Llama", {"model_type": "qwen2"}, 'model_type = "qwen2": contradicts architectures, which names LlamaForCausalLM'),
        ("Llama", {"attention_multiplier": 0.0078125}, "attention_multiplier = 0.0078125: LlamaForCausalLM multiplies scores by 0.5"),
        ("Llama", {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0: is computed by no architecture here"),
        ("Llama", {"logits_scaling": 8}, "logits_scaling = 8: is computed by no"),
        ("Mistral", {"logit_scale": 0.0625}, "logit_scale = 0.0625: is computed by no"),
        ("Qwen2", {"residual_multiplier": 0.22}, "residual_multiplier = 0.22: is computed by no"),
        ("Llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is computed by no"),
        ("Qwen3Moe", {"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid": is computed by no'),
        ("Qwen3Moe", {"n_group": 8}, "n_group = 8: is computed by no"),
        ("Llama", {"clip_qkv": 8.0}, "clip_qkv = 8.0: is computed by no"),
        ("Llama", {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]: is computed by no"),
        (
            "Llama",
            {"layer_types": ["sliding_attention"], "sliding_window": 4},
            "names sliding_attention, but no sliding_window is in force",
        ),
        ("Llama", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window = true: is not supported"),
        ("Mistral", {"use_sliding_window": False, "sliding_window": 4}, "use_sliding_window = false: contradicts the window of 4"),
        ("Mistral", {"use_sliding_window": False}, "contradicts the window of 4096"),
        ("Phi3", {"use_sliding_window": False, "sliding_window": 4}, "contradicts the window of 4"),
        ("Mixtral", {"norm_topk_prob": False}, "norm_topk_prob = false: the weights of a token's experts always sum to one in Mixtral"),
    ],
)
def test_a_field_that_readers_take_in_two_ways_is_refused(architecture: str, fields: dict[str, object], reason: str, folder: Any) -> None:
    """The name is of a model that is computed here, and the fields are another family's: either reading may be wrong."""
    change(folder, architectures=[f"{architecture}ForCausalLM"], moe_intermediate_size=6, num_experts=3, **fields)
    with pytest.raises(CheckpointError) as caught:
        describe(folder.path)
    assert reason in str(caught.value)


def test_fields_of_other_families_that_change_nothing_are_ignored(folder: Any) -> None:
    usual = describe(folder.path)
    neutral = {"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "logits_scaling": 1, "final_logit_softcapping": None}
    change(folder, model_type="own", clip_qkv=None, n_group=1, layer_types=["full_attention"], sliding_window=4, **neutral)
    assert describe(folder.path) == usual


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 70 + "]" * 70, "JSON nested more than 64 deep"),
        ('{"a":' * 70 + "1" + "}" * 70, "JSON nested more than 64 deep"),
        ("[" * 2000 + "]" * 2000, "JSON nested"),
        ("-1e999", "is beyond every number"),
        ("NaN", "NaN is not JSON"),
        ("9" * 5000, "not valid JSON"),
        ("[" + "{}," * 140000 + "{}]", "more than 131072 objects and lists"),
        ('"' + "x" * (5 << 20) + '"', "more than 4194304 bytes of JSON"),
    ],
    ids=["lists", "objects", "thousands", "infinite", "NaN", "digits", "entries", "text"],
)
def test_what_nothing_reads_is_bounded(text: str, reason: str, folder: Any) -> None:
    file = folder.path / "config.json"
    file.write_text(json.dumps({**folder.config, "ignored": "HERE"}).replace('"HERE"', text))
    with pytest.raises(CheckpointError, match=reason):
        describe(folder.path)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 0.0]},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": "[2.0, 2.0]"},
        {"rope_type": "longrope", "long_factor": [2.0, 2.0]},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "short_mscale": 1.1},
        {"type": "su"},
        {"type": "mrope", "mrope_section": [1, 1]},
        {"rope_type": "default", "mrope_section": [1, 1]},
        {"factor": 4.0},
        {"rope_type": 3},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "linear", "factor": 1e6, "original_max_position_embeddings": 2**20},
        {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": "yes"},
        {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.0},
        {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9, "attention_factor": 0.9},
        {"rope_type": "linear", "factor": 4.0, "attn_factor": 0.9},
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_that_is_not_done_is_refused(folder: Any, field: str, scaling: dict[str, object]) -> None:
    change(folder, **{field: scaling})
    assert field in refusal(folder).reason


def test_both_spellings_of_rope_parameters_mean_the_same(folder: Any) -> None:
    expected = RopeSpec(theta=777.0, rotary_dim=4, scaling=LinearScaling(factor=2.0, original_positions=32))
    change(folder, rope_theta=777.0, rope_scaling={"type": "linear", "factor": 2.0})
    older = folder.load(load_format="dummy").model.spec.layers[0].attention.rope
    change(folder, rope_theta=DELETED, rope_scaling=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 777})
    newer = folder.load(load_format="dummy").model.spec.layers[0].attention.rope
    assert older == newer == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("saved", "added"),
    [
        ({"rope_type": "default", "rope_theta": 777.0}, YARN),
        ({"rope_theta": 777.0}, YARN),
        ({"type": "default", "rope_type": None, "rope_theta": 777}, {**YARN, "rope_theta": 777.0, "type": "yarn", "beta_fast": None}),
        ({**YARN, "rope_theta": 777.0}, YARN),
        ({**YARN, "rope_theta": 777.0}, {}),
        ({**YARN, "rope_theta": 777.0}, None),
        ({"rope_theta": 777.0, "original_max_position_embeddings": 32}, {"type": "yarn", "factor": 4.0}),
    ],
)
def test_a_scaling_that_a_model_card_adds_is_read_beside_what_transformers_saves(
    folder: Any, saved: dict[str, object], added: dict[str, object] | None
) -> None:
    """One was to be left out, and with rope_parameters theta went too."""
    change(folder, rope_parameters={**YARN, "rope_theta": 777.0})
    expected = folder.load(load_format="dummy")
    change(folder, rope_parameters=saved, rope_scaling=added)
    found = folder.load(load_format="dummy")
    assert found.model.spec == expected.model.spec
    assert found.max_model_len == 128


@pytest.mark.parametrize(
    ("saved", "added", "named"),
    [
        ({"rope_type": "linear", "factor": 4.0}, YARN, "rope_type"),
        ({**YARN, "factor": 2.0}, YARN, "factor"),
        (YARN, {"type": "default"}, "rope_type"),
        ({"rope_type": "default", "rope_theta": 777.0}, {**YARN, "rope_theta": 10_000.0}, "rope_theta"),
    ],
)
def test_two_scalings_that_differ_are_refused_with_where_to_write_one(
    folder: Any, saved: dict[str, object], added: dict[str, object], named: str
) -> None:
    change(folder, rope_parameters=saved, rope_scaling=added)
    error = refusal(folder)
    assert f"{named} is " in error.reason
    assert "rope_scaling" in error.reason
    assert "into rope_parameters, beside rope_theta" in error.remedy


LONG = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({}, 32),
        ({"rope_scaling": None}, 32),
        ({"rope_scaling": {}}, 32),
        ({"rope_scaling": {"type": "default"}}, 32),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"type": "linear", "factor": 4, "original_max_position_embeddings": 8}}, 32),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, 32),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}}, 96),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}, 64),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 8}}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 1.3, "original_max_position_embeddings": 30}}, 39),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": None, "attention_factor": None, "finetuned": True}}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
                           "original_max_position_embeddings": 4}}, 32),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 4,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 32),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 4, "sliding_window_pattern": 1,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 128),
    ],
)  # fmt: skip
def test_scaling_that_is_added_to_a_model_gives_its_context(folder: Any, fields: dict[str, object], context: int) -> None:
    """The cards of Qwen 2.5 and 3 say to add YaRN, and max_position_embeddings stays what it was; other kinds come with a model."""
    change(folder, **fields)
    assert describe(folder.path).max_model_len == context
    loaded = folder.load(load_format="dummy")
    assert loaded.max_model_len == context
    assert loaded.model.blocks[0].attention.cos_sin.shape[0] == context
    with pytest.raises(ConfigError, match="more need rope_scaling"):
        folder.load(load_format="dummy", max_model_len=context + 1)


def test_dynamic_scaling_is_refused_with_what_to_write_instead(folder: Any) -> None:
    change(folder, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert '"yarn"' in refusal(folder).remedy


def test_longrope_takes_its_long_factors_where_contexts_may_be_long(folder: Any) -> None:
    """One table serves all positions; engines whose tables differ compute other keys, so that their digests differ."""
    change(folder, rope_scaling={"type": "longrope", **LONG}, original_max_position_embeddings=8)
    long, short = folder.load(load_format="dummy", max_model_len=32), folder.load(load_format="dummy")
    assert (long.max_model_len, short.max_model_len) == (32, 8)
    assert long.model_digest != short.model_digest
    assert folder.load(load_format="dummy", max_model_len=9).model_digest == long.model_digest
    table, short_table = long.model.blocks[0].attention.cos_sin, short.model.blocks[0].attention.cos_sin
    assert torch.allclose(table[4, [0, 2]], short_table[2, [0, 2]])  # the first pair turns half as fast
    assert torch.allclose(table[6, [1, 3]], short_table[2, [1, 3]])


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("Qwen3ForCausalLM", {}), ("Gemma3ForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"})],
)
def test_a_family_s_head_size_where_the_file_has_none(folder: Any, architecture: str, fields: dict[str, object]) -> None:
    config = {"Qwen3ForCausalLM": Qwen3Config, "Gemma3ForCausalLM": Gemma3TextConfig}[architecture]
    change(folder, architectures=[architecture], **fields)
    assert describe(folder.path).kv_groups[0].head_dim == config().head_dim
    change(folder, head_dim=None)
    assert describe(folder.path).kv_groups[0].head_dim == 4


@pytest.mark.parametrize(
    ("architectures", "model_type", "served"),
    [
        (None, "llama", "LlamaForCausalLM"),
        ([], "mistral", "MistralForCausalLM"),
        (None, "gemma3_text", "Gemma3ForCausalLM"),
        (["LlamaForCausalLM", "OtherForCausalLM"], "llama", "LlamaForCausalLM"),
        (["OwnForCausalLM", "MistralForCausalLM"], "own", "MistralForCausalLM"),
    ],
)
def test_an_architecture_is_found_by_either_of_its_names(folder: Any, architectures: object, model_type: str, served: str) -> None:
    change(folder, architectures=architectures, model_type=model_type, hidden_activation="gelu_pytorch_tanh")
    assert describe(folder.path).architecture == served


def test_every_model_type_is_that_of_its_architecture_in_transformers() -> None:
    assert set(MODEL_TYPES.values()) == set(ARCHITECTURES)
    for model_type, architecture in MODEL_TYPES.items():
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == architecture


def test_code_that_a_checkpoint_brings_is_left_alone(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every Phi-3 names code of its own in auto_map, and needs none."""
    change(folder, auto_map={"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"})
    (folder.path / "modeling_own.py").write_text("raise SystemExit('it was run')")
    with caplog.at_level("INFO"):
        assert folder.load(load_format="dummy").architecture == "LlamaForCausalLM"
    (line,) = [record.message for record in caplog.records if "auto_map" in record.message]
    assert "is ignored" in line
    change(folder, architectures=["OwnForCausalLM"])
    error = refusal(folder)
    assert "OwnForCausalLM" in error.reason
    assert "the code that auto_map names for it is never run" in error.reason


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000,
      '{"a": ' * 3000 + "1" + "}" * 3000, '"\ud800"', '{"x":"' + "y" * 5_000_000 + '"}'],
    ids=["empty", "list", "cut", "quotes", "nan", "duplicate", "deep-lists", "deep-objects", "surrogate", "too-long"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bad_json(folder: Any, name: str, text: str) -> None:
    (folder.path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refusal(folder).file.endswith(name)


def test_no_config_and_no_folder(folder: Any) -> None:
    (folder.path / "config.json").unlink()
    assert refusal(folder).file.endswith("config.json")
    folder.path = folder.path / "nowhere"
    assert "not a folder" in refusal(folder).reason


def test_sampling_defaults(folder: Any) -> None:
    assert folder.load().sampling_defaults == {}
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "do_sample": True, "min_p": None, "num_beams": 1}
    (folder.path / "generation_config.json").write_text(json.dumps(generation))
    assert folder.load().sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 7}
    (folder.path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert folder.load().sampling_defaults == {"temperature": 0.5}
    (folder.path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": False}))
    assert folder.load().sampling_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_p", 1.5), ("top_k", "many"), ("max_new_tokens", 0), ("eos_token_id", 99)]
)
def test_generation_defaults_that_break_a_rule(folder: Any, field: str, value: object) -> None:
    (folder.path / "generation_config.json").write_text(json.dumps({field: value}))
    error = refusal(folder)
    assert error.file.endswith("generation_config.json")
    assert field.replace("max_new_tokens", "max_tokens") in error.reason


def test_no_end_token_is_an_empty_list(folder: Any) -> None:
    change(folder, eos_token_id=DELETED)
    assert folder.load().eos_token_ids == ()


def test_max_model_len_shortens_tables_and_may_not_exceed_the_checkpoint(folder: Any) -> None:
    loaded = folder.load(max_model_len=20)
    assert loaded.max_model_len == 20
    assert loaded.model.blocks[0].attention.cos_sin.shape == (20, 4)
    for wanted in (0, -1, 33):
        with pytest.raises(ConfigError, match="max_model_len"):
            folder.load(max_model_len=wanted)


def test_a_window_longer_than_the_context_is_no_window(folder: Any) -> None:
    change(folder, architectures=["MistralForCausalLM"], sliding_window=20)
    assert folder.load().model.kv_groups[0].window == 20
    assert folder.load(max_model_len=20).model.kv_groups[0].window is None


def test_a_mistral_without_the_field_has_the_family_s_window(folder: Any) -> None:
    change(folder, architectures=["MistralForCausalLM"], max_position_embeddings=8192, sliding_window=DELETED)
    assert folder.load().model.kv_groups[0].window == MistralConfig().sliding_window
    change(folder, sliding_window=None)
    assert folder.load().model.kv_groups[0].window is None


def test_options_that_cannot_be_met_are_refused_by_name(folder: Any) -> None:
    with pytest.raises(ConfigError, match="load_format"):
        folder.load(load_format="pt")


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention"]}),
        ("MistralForCausalLM", {"sliding_window": 0}),
        ("MixtralForCausalLM", {"attention_bias": True}),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9, "num_local_experts": 8}),
        ("Qwen2ForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"]}),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 2}),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"], "sliding_window": 4}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1], "num_experts": 8, "moe_intermediate_size": 4}),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(folder: Any, architecture: str, fields: dict[str, object]) -> None:
    change(folder, architectures=[architecture], **fields)
    assert next(iter(fields)) in refusal(folder).reason


def test_describe_reads_the_configuration_alone(folder: Any) -> None:
    loaded = folder.load()
    folder.weights.unlink()
    described = describe(folder.path)
    assert described.num_parameters == sum(tensor.numel() for tensor in folder.tensors.values())
    assert described.kv_groups == loaded.model.kv_groups
    assert (described.resident_bytes, described.weight_bytes) == (loaded.resident_bytes, loaded.weight_bytes)
    assert described.dtype_name == "float32"
    assert describe(folder.path, dtype=torch.bfloat16).resident_bytes * 2 == described.resident_bytes


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_byte_order_mark_is_no_part_of_a_file(folder: Any, name: str) -> None:
    """Editors of Windows write one."""
    path = folder.path / name
    text = path.read_text() if path.exists() else json.dumps({"eos_token_id": 5})
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\n")
    assert folder.load().architecture == "LlamaForCausalLM"


def test_a_key_that_stands_twice_is_named(folder: Any) -> None:
    text = (folder.path / "config.json").read_text()
    (folder.path / "config.json").write_text(text[:-1] + ', "vocab_size": 13}')
    assert 'the key "vocab_size" appears twice' in refusal(folder).reason


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_a_link_out_of_the_folder(folder: Any, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / name
    outside.write_text("{}")
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(outside)
    assert "leads out of the folder" in refusal(folder).reason
    outside.unlink()
    assert refusal(folder).reason == "no such file"
