"""`headrace plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure


def planned(headrace: Headrace, *arguments: str) -> dict[str, object]:
    done = headrace("plan", *arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_seventy_billion_on_four_h100(headrace: Headrace) -> None:
    found = planned(headrace, "llama-70b", "--gpu", "h100", "--count", "4", "--context", "2048")
    assert found["weights_bytes"] == pytest.approx(138e9, rel=0.01)
    assert found["kv_bytes_per_token"] == 327_680
    assert found["resident_tokens"] == pytest.approx(560_000, rel=0.02)
    assert found["sequences"] == pytest.approx(270, rel=0.02)
    assert isinstance(found["cost_per_1m_tokens"], float)
    layouts = found["layouts"]
    assert isinstance(layouts, list)
    assert (layouts[0]["tp"], layouts[0]["pp"], layouts[0]["reason"]) == (4, 1, "")
    assert set(found["formulas"]) >= {"weights_bytes", "tpot_s", "cost_per_1m_tokens"}  # type: ignore[call-overload]


def test_less_memory_of_each_device_holds_less(headrace: Headrace) -> None:
    whole, part = (
        planned(headrace, "llama-70b", "--gpu", "h100", "--count", "4", "--memory-fraction", fraction)["resident_tokens"]
        for fraction in ("1", "0.9")
    )
    assert isinstance(whole, int)
    assert isinstance(part, int)
    assert part < whole


def test_the_cheapest_device_is_found_and_the_others_are_shown(headrace: Headrace) -> None:
    done = headrace("plan", "llama-70b", "--users", "1000", "--tokens-per-user", "30", "--context", "2048")
    assert done.returncode == 0, done.stderr
    assert "Cheapest first:" in done.stdout
    assert "h100       8 x TP 4" in done.stdout
    found = planned(headrace, "llama-70b", "--gpu", "h100,a100", "--users", "1000", "--tokens-per-user", "30", "--context", "2048")
    assert found["cheapest"] == "h100"


def test_two_cards_and_fifty_users(headrace: Headrace) -> None:
    done = headrace("plan", "llama-3-8b", "--gpu", "rtx4090", "--count", "2", "--users", "50")
    assert done.returncode == 0, done.stderr
    assert "Chosen: 1 x TP 2, 2 device(s)." in done.stdout
    assert "No --tokens-per-user: 20 per second" in done.stdout


def test_what_nothing_serves_ends_with_1_and_says_why(headrace: Headrace) -> None:
    done = headrace("plan", "llama-3-405b", "--gpu", "rtx4090", "--count", "2")
    assert done.returncode == 1
    assert "No layout serves this: weights of 811.7 GB do not fit in 48.0 GB." in done.stdout


def test_devices_that_are_left_over_are_named(headrace: Headrace) -> None:
    assert "1 of 5 devices are not needed" in headrace("plan", "llama-70b", "--gpu", "h100", "--count", "5").stdout


def test_every_goal_of_an_encoder_counts(headrace: Headrace) -> None:
    found = planned(headrace, "bge-m3", "--gpu", "l40s", "--slo", "ttft=10s,ttft_p95=0.1ms")
    assert found["is_met"] is False


def test_every_number_has_its_formula(headrace: Headrace) -> None:
    done = headrace("plan", "mistral-7b", "--gpu", "h100", "--count", "1", "--explain")
    assert "2 (key, value) x 32 layers x 8 KV heads x 128 x 2 bytes" in done.stdout
    assert "$3 per hour / 3600" in done.stdout


def test_prompts_count_where_their_rate_is_known(headrace: Headrace) -> None:
    few = planned(headrace, "llama-3-8b", "--gpu", "h100", "--requests-per-second", "5")
    many = planned(headrace, "llama-3-8b", "--gpu", "h100", "--requests-per-second", "50")
    assert few["devices"] < many["devices"]  # type: ignore[operator]
    assert many["ttft_p95_s"] > many["ttft_s"]  # type: ignore[operator]


def test_goals_are_kept(headrace: Headrace) -> None:
    found = planned(headrace, "llama-3-8b", "--gpu", "h100", "--requests-per-second", "50", "--slo", "ttft_p95=400ms,tpot=20ms")
    assert found["ttft_p95_s"] <= 0.4  # type: ignore[operator]
    assert found["tpot_s"] <= 0.02  # type: ignore[operator]


def test_a_bundled_model_and_an_embedding_model_are_planned(headrace: Headrace) -> None:
    assert planned(headrace, "headrace-tiny", "--gpu", "cpu", "--count", "1")["is_met"] is True
    embedding = planned(headrace, "bge-m3", "--gpu", "l40s", "--requests-per-second", "500", "--context", "512")
    assert embedding["tokens_per_s"] >= 256_000  # type: ignore[operator]
    assert "kv_bytes_per_token" not in embedding


def test_a_quantized_folder_is_planned_with_its_own_dtype_or_the_given_one(headrace: Headrace, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "quantization_config": {"quant_method": "awq", "bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = planned(headrace, str(tmp_path), "--gpu", "rtx4090", "--count", "1")
    wide = planned(headrace, str(tmp_path), "--gpu", "rtx4090", "--count", "1", "--dtype", "bf16")
    assert own["dtype"] == "int4"
    assert wide["weights_bytes"] == 4 * own["weights_bytes"]  # type: ignore[operator]
    config["quantization_config"] = {"quant_method": "magic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = headrace("plan", str(tmp_path), "--gpu", "rtx4090")
    assert refused.returncode == 3
    assert "quant_method" in refused.stderr
    assert headrace("plan", str(tmp_path), "--gpu", "rtx4090", "--count", "1", "--dtype", "int8").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["lama-70b"], 3, "Did you mean llama-70b?"),
        (["llama-70b", "--gpu", "h101"], 3, "'h101' is not in the catalogue"),
        (["llama-70b", "--dtype", "int3"], 2, "--dtype: 'int3' is not known"),
        (["llama-70b", "--kv-dtype", "int4"], 2, "--kv-dtype: 'int4' is not known"),
        (["llama-70b", "--memory-fraction", "1.2"], 2, "--memory-fraction"),
        (["llama-70b", "--memory-fraction", "nan"], 2, "--memory-fraction"),
        (["llama-70b", "--slo", "ttfb=1s"], 2, "'ttfb=1s' is no goal"),
        (["llama-70b", "--slo", "tpot=0ms"], 2, "'tpot=0ms' is no goal"),
        (["llama-70b", "--tokens-per-user", "30"], 2, "--tokens-per-user needs --users"),
        (["llama-70b", "--users", "10", "--tokens-per-user", "nan"], 2, "--tokens-per-user: expected a number above 0"),
        (["llama-70b", "--requests-per-second", "0"], 2, "--requests-per-second: expected a number above 0"),
        (["llama-70b", "--users", "10", "--tokens-per-user", "10", "--requests-per-second", "500"], 2, "an answer must have at least 1"),
        (["llama-70b", "--prices", "/nowhere.toml"], 3, "/nowhere.toml: cannot be read"),
        (["llama-70b", "--gpu", ","], 2, "names no device"),
        (["bge-m3", "--users", "50"], 2, "bge-m3 generates nothing"),
        (["bge-m3", "--slo", "tpot=1ms"], 2, "it has no tpot"),
        (["70B"], 3, "Did you mean llama-3-70b?"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(headrace: Headrace, arguments: list[str], code: int, named: str) -> None:
    done = headrace("plan", *arguments)
    assert done.returncode == code, done.stderr
    assert named in done.stderr


@pytest.mark.process
def test_a_plot_shows_the_devices(headrace: Headrace, tmp_path: Path) -> None:

    file = tmp_path / "plan.svg"
    done = headrace("plan", "llama-3-8b", "--gpu", "h100,l40s", "--slo", "tpot=40ms", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text().startswith("<?xml")


def test_a_plot_without_matplotlib_says_how_to_get_it(headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = headrace("plan", "llama-3-8b", "--gpu", "h100", "--plot", str(tmp_path / "plan.svg"))
    assert done.returncode == 3
    assert "pip install 'headrace[plots]'" in done.stderr
