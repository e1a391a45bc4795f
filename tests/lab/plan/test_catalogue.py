"""Tests the catalogue's files, those of users, and shapes read from config.json."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.core.errors import CheckpointError, ConfigError
from headrace.lab.plan.catalogue import is_old, read_catalogue
from headrace.lab.plan.shapes import find_entry, read_shape
from headrace.tensor.checkpoint.config import ConfigFile

pytestmark = pytest.mark.pure

PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3-405b": 405.85,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.70,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "gemma-2-27b": 27.23,
    "deepseek-v3": 671.0,
    "gpt-3-175b": 174.6,
    "bge-large": 0.335,
    "bge-m3": 0.568,
}
"""Billions of weights, as the models' authors count them."""

DEVICE = """
[links.wire]
gb_per_s = 10
latency_us = 5
devices = 2

[devices.mine]
title = "Mine"
memory_gb = 10
gb_per_s = 100
tflops = { bf16 = 10 }
link = "wire"
network = "ethernet"
price_per_hour = 0.2
price_source = "assumption"
as_of = "2026-10"
source = "measured"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


def test_weights_of_every_model_are_those_that_its_authors_count() -> None:
    catalogue = read_catalogue()
    counted = {name: find_entry(name, catalogue.models)[0].num_params / 1e9 for name in catalogue.models}
    assert counted == {name: pytest.approx(number, rel=0.01) for name, number in PUBLISHED.items()}


def test_devices_of_the_hardware_page_are_there() -> None:
    names = "a100-40 a100 h100 h200 l40s a10g rtx4090 mi300x tpu-v5e tpu-v5p groq cerebras cpu"
    assert set(names.split()) <= set(read_catalogue().devices)


def test_every_price_names_provider_list_and_month_or_is_an_assumption() -> None:
    for name, device in read_catalogue().devices.items():
        if device.price_per_hour is None:
            assert device.price_source == "", name
        else:
            assert re.fullmatch(r"assumption|[^,:/]+, [^,:/]+, 20\d\d-\d\d", device.price_source), name


def test_a_file_of_ones_own_adds_devices_links_and_models(tmp_path: Path) -> None:
    model = "[models.toy]\nhidden_size = 64\nintermediate_size = 128\nnum_hidden_layers = 2\nnum_attention_heads = 4\n"
    own = read_catalogue(written(tmp_path, DEVICE + model + "vocab_size = 100\nmax_position_embeddings = 64\n"))
    assert own.device("mine").link.num_devices == 2
    assert own.device("h100").memory_bytes == 80e9
    assert find_entry("toy", own.models)[0].num_layers == 2


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("memory_gb = 10", "memry_gb = 10", "devices.mine.memry_gb: is not a known key. Did you mean memory_gb?"),
        ("memory_gb = 10", "memory_gb = -1", "devices.mine.memory_gb: must be a number from 0.001 to 1e+06, got -1"),
        ("memory_gb = 10", 'memory_gb = "10"', "devices.mine.memory_gb: expected float, got str"),
        ("price_per_hour = 0.2", "price_per_hour = nan", "devices.mine.price_per_hour: must be a number from 1e-06 to 1e+06, got nan"),
        ("bf16 = 10", "fp8 = 10", "devices.mine.tflops: lacks bf16"),
        ("bf16 = 10", "bf16 = inf", "devices.mine.tflops.bf16: must be a number from 0.001 to 1e+09, got inf"),
        ('link = "wire"', 'link = "wires"', "devices.mine.link: 'wires' is no link"),
        ('as_of = "2026-10"', 'as_of = "October"', "devices.mine.as_of: 'October' is no month"),
        ('source = "measured"', "", "devices.mine.source: is missing"),
        ('price_source = "assumption"', "", "own.toml: devices.mine.price_source: is missing beside price_per_hour"),
        ('price_source = "assumption"', 'price_source = "a cloud"', "devices.mine.price_source: 'a cloud' names no provider and list"),
        ("price_per_hour = 0.2", "", "devices.mine.price_source: has no price_per_hour beside it"),
        ("devices = 2", "devices = 0", "links.wire.devices: must be a number from 1 to 65536, got 0"),
        ("[devices.mine]", "[devices.mine", "is not TOML"),
        ("memory_gb = 10", "memory_gb = 1e308", "own.toml: devices.mine.memory_gb: must be a number from 0.001 to 1e+06, got 1e+308"),
        ("gb_per_s = 100", "gb_per_s = 1e-320", "own.toml: devices.mine.gb_per_s: must be a number from"),
        ("price_per_hour = 0.2", "price_per_hour = 1e308", "own.toml: devices.mine.price_per_hour: must be a number from"),
        ("memory_gb = 10", f"memory_gb = 1{'0' * 400}", "own.toml: holds an integer that is too large"),
        ('link = "wire"', 'link = "wires"', "own.toml: devices.mine.link"),
    ],
)
def test_what_is_wrong_in_a_catalogue_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_catalogue(written(tmp_path, DEVICE.replace(old, new)))
    assert named in str(refused.value)


def test_a_link_that_no_device_has_is_checked(tmp_path: Path) -> None:
    unused = DEVICE + "\n[links.unused]\ngb_per_s = -5\nlatency_us = 1\ndevices = 2\n"
    with pytest.raises(ConfigError, match=r"own\.toml: links\.unused\.gb_per_s: must be a number from 0\.001"):
        read_catalogue(written(tmp_path, unused))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "num_key_value_heads",
            "num_key_value_head",
            "models.typo.num_key_value_head: is not a known key. Did you mean num_key_value_heads?",
        ),
        ("num_hidden_layers = 2", "num_hidden_layers = -2", "own.toml: models.typo: num_hidden_layers = -2: must be an integer"),
        ("vocab_size = 100", "", "own.toml: models.typo: vocab_size: is missing"),
        (
            "vocab_size = 100",
            "vocab_size = 100\nquantization_config = { quant_method = 'awq' }",
            "models.typo.quantization_config: is not a known key",
        ),
        ("vocab_size = 100", "vocab_size = 100\nstate_size = 16", "models.typo.state_size: is not a known key"),
    ],
)
def test_a_model_of_ones_own_is_checked_whether_it_is_planned_or_not(tmp_path: Path, old: str, new: str, named: str) -> None:
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in (GOOD | {"num_key_value_heads": 2}).items()]
    with pytest.raises((ConfigError, CheckpointError)) as refused:
        read_catalogue(written(tmp_path, "[models.typo]\n" + "\n".join(lines).replace(old, new)))
    assert named in str(refused.value)


def test_a_price_above_its_table_has_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.egress_per_gb: is not in the catalogue\. Write it above \[gpu\]"):
        read_catalogue(prices=written(tmp_path, "[gpu]\nh100 = 2.5\negress_per_gb = 0.05\n"))


@pytest.mark.parametrize("price", ["0", "0.0", "nan", "-3", "inf"])
def test_a_price_that_is_no_price_is_refused_by_name(tmp_path: Path, price: str) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.h100: must be a number from 1e-06 to 1e\+06, got"):
        read_catalogue(prices=written(tmp_path, f"[gpu]\nh100 = {price}\n"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gpu]\nh101 = 1.0\n", "gpu.h101: is not in the catalogue"),
        ("egress = 0.1\n", "egress: is not a known key. Did you mean egress_per_gb?"),
        ("egress_per_gb = nan\n", "egress_per_gb: must be a number from 0 to 1e+06, got nan"),
    ],
)
def test_what_is_wrong_in_a_file_of_prices_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_catalogue(prices=written(tmp_path, text))
    assert named in str(refused.value)


def test_prices_of_ones_own_take_the_place_of_the_catalogues(tmp_path: Path) -> None:
    own = read_catalogue(prices=written(tmp_path, "[gpu]\nh100 = 2.5\n"))
    assert own.device("h100").price_per_hour == 2.5
    assert not is_old(own.device("h100").as_of, "2026-11")


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is longer than"):
        read_catalogue(written(tmp_path, "# " + "x" * (2 << 20)))


def test_an_entry_is_old_after_a_year() -> None:
    assert is_old("2025-06", "2026-07")
    assert not is_old("2025-06", "2026-06")


GOOD = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": None}, "hidden_size = null: is missing"),
        ({"hidden_size": -64}, "hidden_size = -64: must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be an integer from 1 to 1024"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be an integer from 1"),
        ({"num_attention_heads": 5}, "num_attention_heads = 5: must divide hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads"),
        ({"vocab_size": "many"}, 'vocab_size = "many": must be an integer'),
        ({"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be an integer from 1 to 4"),
        ({"dtype": "float8_e5m2"}, "dtype"),
    ],
)
def test_absurd_fields_of_an_entry_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        find_entry("some", {"some": GOOD | fields})
    assert named in str(refused.value)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "full_attention_interval = 4: only layers of attention"),
        ({"layer_types": ["linear_attention", FULL]}, "layer_types"),
        ({"layer_types": [FULL]}, "layer_types"),
        ({"layer_types": [SLIDING] * 5, "sliding_window": 8}, "must name full_attention or sliding_attention for each of 2 layers"),
        ({"layer_types": [1, 2]}, "layer_types"),
        ({"layer_types": [SLIDING, FULL]}, "names sliding_attention, but there is no sliding_window"),
        ({"state_size": 16}, "state_size = 16: only layers of attention"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads = 16: only layers of attention"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder = true: only layers of attention"),
        ({"num_decoder_layers": 6}, "num_decoder_layers"),
    ],
)
def test_layers_that_are_not_planned_for_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        find_entry("some", {"some": GOOD | fields})
    assert named in str(refused.value)


def test_layers_with_a_window_are_counted_by_their_types() -> None:
    shape = read_shape(ConfigFile("config.json", GOOD | {"layer_types": [SLIDING, FULL], "sliding_window": 8}), "mixed")
    assert (shape.window, shape.num_window_layers) == (8, 1)
    assert shape.num_resident_kv_values(64) == shape.num_kv_values / 2 * (64 + 8)


def test_a_family_that_is_not_known_is_read_as_llama_and_says_so() -> None:
    known, unknown = (read_shape(ConfigFile("config.json", GOOD | {"model_type": kind}), "some") for kind in ("llama", "brand_new"))
    assert unknown.is_assumed
    assert not known.is_assumed
    assert unknown.num_params == known.num_params


def test_encoders_with_gates_have_three_matrices() -> None:
    two, three = (read_shape(ConfigFile("config.json", GOOD | {"model_type": kind}), "some") for kind in ("bert", "modernbert"))
    assert three.num_params - two.num_params == 2 * 64 * 128


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "auto"}, "bf16"),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_dtype_of_the_weights_is_the_entry_s(fields: dict[str, object], dtype: str) -> None:
    assert find_entry("some", {"some": GOOD | fields})[1] == dtype


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts": 8, "interleave_moe_layer_step": 2}, "interleave_moe_layer_step = 2: experts in some layers alone"),
        ({"num_experts": 8, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": 8, "decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_experts_in_some_layers_alone_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        find_entry("some", {"some": GOOD | fields})


def test_heads_are_tied_where_the_family_ties_them() -> None:
    counted = [find_entry("some", {"some": GOOD | {"model_type": kind}})[0].num_params for kind in ("llama", "gemma2")]
    assert counted[0] - counted[1] == 100 * 64


def test_names_of_ones_own_are_found_as_they_are_written(tmp_path: Path) -> None:
    text = DEVICE.replace("[devices.mine]", "[devices.My_Card]") + "[models.MyModel]\n" + "\n".join(f"{k} = {v!r}" for k, v in GOOD.items())
    own = read_catalogue(written(tmp_path, text.replace("'", '"')))
    assert own.device("My_Card").title == "Mine"
    assert find_entry("MyModel", own.models)[0].hidden_size == 64


def test_products_in_fp32_take_longer(tmp_path: Path) -> None:
    own = read_catalogue(written(tmp_path, DEVICE))
    assert own.device("mine").flops_of("fp32") == own.device("mine").flops_of("bf16") / 16
    assert own.device("h100").flops_of("fp32") == 67e12


def test_a_name_that_is_not_there_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean llama-70b"):
        find_entry("lama-70b", read_catalogue().models)
