"""Tests `headrace plan` as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.lab.plan.report import WORDS
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure


def not_finite(word: str) -> float:
    raise AssertionError(f"{word} is no figure, and no JSON")


def planned(headrace: Headrace, *arguments: str) -> dict[str, object]:
    done = headrace("plan", *arguments, "--layouts", "all", "--json")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout, parse_constant=not_finite)
    assert isinstance(found, dict)
    return found


def test_seventy_billion_on_four_h100(headrace: Headrace) -> None:
    found = planned(headrace, "llama-70b", "--gpu", "h100", "--count", "4", "--context", "2048", "--memory-fraction", "1")
    assert found["weights_bytes"] == pytest.approx(138e9, rel=0.01)
    assert found["kv_bytes_per_token"] == 327_680
    assert found["resident_tokens"] == pytest.approx(560_000, rel=0.02)
    assert found["sequences"] == pytest.approx(270, rel=0.02)
    assert isinstance(found["cost_per_1m_at_capacity"], float)
    layouts = found["layouts"]
    assert isinstance(layouts, list)
    assert (layouts[0]["tp"], layouts[0]["pp"], layouts[0]["reason"]) == (4, 1, "")
    assert set(found["formulas"]) >= {"weights_bytes", "tpot_s", "cost_per_1m_at_capacity"}  # type: ignore[call-overload]


def test_less_memory_of_each_device_holds_less(headrace: Headrace) -> None:
    whole, part = (
        planned(headrace, "llama-70b", "--gpu", "h100", "--count", "4", "--memory-fraction", fraction)["resident_tokens"]
        for fraction in ("1", "0.9")
    )
    assert isinstance(whole, int)
    assert isinstance(part, int)
    assert part < whole


def test_the_cheapest_device_is_found_and_the_others_are_shown(headrace: Headrace) -> None:
    done = headrace("plan", "llama-70b", "--users", "1000", "--tokens-per-user", "30", "--context", "2048", "--layouts", "all")
    assert done.returncode == 0, done.stderr
    assert "Cheapest first:" in done.stdout
    assert "h100       8 x TP 4" in done.stdout
    found = planned(headrace, "llama-70b", "--gpu", "h100,a100", "--users", "1000", "--tokens-per-user", "30", "--context", "2048")
    assert found["cheapest"] == "a100"


def test_two_cards_and_fifty_users(headrace: Headrace) -> None:
    done = headrace("plan", "llama-3-8b", "--gpu", "rtx4090", "--count", "2", "--users", "50", "--layouts", "all")
    assert done.returncode == 0, done.stderr
    assert "Chosen: 1 x TP 2, 2 NVIDIA RTX 4090 24 GB." in done.stdout
    assert "No --tokens-per-user: 20 per second" in done.stdout


def test_what_nothing_serves_ends_with_1_and_says_why(headrace: Headrace) -> None:
    done = headrace("plan", "llama-3-405b", "--gpu", "rtx4090", "--count", "2", "--layouts", "all")
    assert done.returncode == 1
    assert "No layout serves this: weights of 811.7 GB do not fit in 43.2 GB." in done.stdout


def test_devices_that_are_left_over_are_named(headrace: Headrace) -> None:
    assert "1 of 5 devices are not needed" in headrace("plan", "llama-70b", "--gpu", "h100", "--count", "5", "--layouts", "all").stdout


def test_every_goal_of_an_encoder_counts(headrace: Headrace) -> None:
    found = planned(headrace, "bge-m3", "--gpu", "l40s", "--slo", "ttft=10s,ttft_p95=0.1ms")
    assert found["is_met"] is False


def test_every_number_has_its_formula(headrace: Headrace) -> None:
    arguments = ("mistral-7b", "--gpu", "h100", "--count", "1")
    formulas = planned(headrace, *arguments)["formulas"]
    assert isinstance(formulas, dict)
    shown = headrace("plan", *arguments, "--layouts", "all", "--explain").stdout
    for name, formula in formulas.items():
        assert re.search(rf"  {WORDS[name]} +\S.*  = {re.escape(formula)}\n", shown), name
        assert re.search(r"\d", formula) or name in ("num_params", "num_active_params"), f"{name} has no number: {formula}"
    assert formulas["kv_bytes_per_token"] == "2 (key, value) x 32 layers x 8 KV heads x 128 x 2 bytes"


def test_three_cards_are_all_used(headrace: Headrace) -> None:
    assert "Chosen: 3 x TP 1, 3 NVIDIA H100 SXM 80 GB." in headrace("plan", "llama-3-8b", "--gpu", "h100", "--count", "3").stdout


def test_no_pipeline_over_machines_is_advised_where_one_machine_does(headrace: Headrace) -> None:
    assert "Chosen: 1 x TP 8, 8 NVIDIA H100 SXM 80 GB." in headrace("plan", "llama-3-70b", "--gpu", "h100", "--layouts", "all").stdout


def test_a_device_that_is_named_twice_is_compared_once(headrace: Headrace) -> None:
    found = planned(headrace, "llama-3-8b", "--gpu", "H100,h100")
    assert "plans" not in found
    assert found["gpu"] == "h100"


def test_a_price_is_not_asked_for_where_there_is_none(headrace: Headrace) -> None:
    assert "look up its price" in headrace("plan", "llama-3-8b", "--gpu", "tpu-v5p").stdout
    shown = headrace("plan", "llama-3-8b", "--gpu", "groq", "--layouts", "all").stdout
    assert "more than a year old." in shown
    assert "look up its price" not in shown
    assert "No layout serves this: weights of 16.1 GB do not fit in 13.2 GB." in shown


def test_replicas_that_stand_by_are_refused_beside_a_count_and_a_rate_out_of_range(headrace: Headrace) -> None:
    counted = headrace("plan", "llama-3-8b", "--gpu", "h100", "--count", "2", "--standby", "1")
    assert counted.returncode == 2
    assert "--standby: it takes devices beside the 2 of --count" in counted.stderr
    slow = headrace("plan", "llama-3-8b", "--gpu", "h100", "--load-gbps", "0")
    assert slow.returncode == 2
    assert "--load-gbps: expected a rate from 0.001 to 1e+06 GB/s, got 0" in slow.stderr
    fast = headrace("plan", "llama-3-8b", "--gpu", "h100", "--load-gbps", "16", "--standby", "1").stdout
    assert re.search(r"load of one replica +21\.0 s", fast)
    assert re.search(r"replicas standing by +1", fast)


def test_an_encoder_has_no_time_per_token(headrace: Headrace) -> None:
    shown = headrace("plan", "bge-m3", "--gpu", "l40s,h100").stdout
    assert " 0.0 ms" not in shown
    plans = planned(headrace, "bge-m3", "--gpu", "l40s")
    layouts = plans["layouts"]
    assert isinstance(layouts, list)
    assert layouts[0]["tpot_s"] is None


def test_costs_at_capacity_and_at_demand_are_apart(headrace: Headrace) -> None:
    found = planned(headrace, "llama-3-8b", "--gpu", "h100", "--users", "10")
    layouts = found["layouts"]
    assert isinstance(layouts, list)
    for name, rate in (("demand", 200), ("capacity", found["capacity_tokens_per_s"])):  # 10 users, 20 tokens/s each
        devices = layouts[0]["price_per_hour"] / (rate * 3600) * 1e6  # type: ignore[operator]
        stored = found["storage_per_month"] / 730 / (rate * 3600) * 1e6  # type: ignore[operator]
        assert found[f"cost_per_1m_at_{name}"] == pytest.approx(devices + stored + found["egress_per_1m_tokens"])


def test_a_user_who_reads_slowly_does_not_make_the_devices_slow(headrace: Headrace) -> None:
    slow, fast = (planned(headrace, "llama-3-8b", "--gpu", "h100", "--users", "1", "--tokens-per-user", each) for each in ("1", "10"))
    assert slow["cost_per_1m_at_capacity"] == pytest.approx(fast["cost_per_1m_at_capacity"], rel=0.2)
    assert slow["cost_per_1m_at_demand"] > 9 * fast["cost_per_1m_at_demand"]  # type: ignore[operator]


def test_what_this_version_runs_is_chosen_and_the_rest_is_apart(headrace: Headrace) -> None:
    done = headrace("plan", "llama-3-8b", "--gpu", "h100", "--count", "2")
    assert "Chosen: 2 x TP 1, 2 NVIDIA H100 SXM 80 GB." in done.stdout
    served, apart = done.stdout.split("Not run by this version, and not chosen: replicas on several GPUs are not planned.")
    assert "TP 2" not in served
    assert "TP 2" in apart
    too_large = headrace("plan", "llama-70b", "--gpu", "h100")
    assert too_large.returncode == 1
    assert "No layout serves this: weights of 138.0 GB do not fit in 72.0 GB." in too_large.stdout
    assert (
        "No layout serves this: Headrace has no backend for AMD MI300X 192 GB." in headrace("plan", "mistral-7b", "--gpu", "mi300x").stdout
    )


def test_the_command_that_starts_the_plan_is_accepted_by_serve(headrace: Headrace) -> None:
    from headrace.cli.flags.vllm import translated

    found = planned(headrace, "headrace-tiny", "--gpu", "cpu", "--requests-per-second", "5", "--input-len", "100", "--output-len", "20")
    command = found["command"]
    assert isinstance(command, str)
    assert re.fullmatch(
        r"headrace serve headrace-tiny --device cpu --replicas \d+ --max-model-len 120 --max-num-seqs \d+ --max-num-batched-tokens 512 "
        r"--gpu-memory-utilization 0.5 --kv-cache-dtype bfloat16 --dtype bfloat16",
        command,
    )
    assert translated(command.split()[1:])[1] == []
    assert headrace(*command.split()[1:], "--help").returncode == 0


SOCKETS = """
[devices.cpu]
title = "A socket of two"
memory_gb = 24
gb_per_s = 50
tflops = { fp32 = 0.4, bf16 = 0.83 }
link = "two"
network = "ethernet"
as_of = "2026-11"
source = "test"

[links.two]
gb_per_s = 20
latency_us = 10
devices = 2
"""


def test_a_machine_of_two_cpus_is_planned_with_a_rank_on_each(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(SOCKETS)
    words = ("llama-3-8b", "--gpu", "cpu", "--catalogue", str(file), "--context", "512", "--count", "4")
    assert "Chosen: 2 x TP 2, 4 A socket of two." in headrace("plan", *words).stdout
    assert " --tensor-parallel-size 2 " in str(planned(headrace, *words)["command"])


def test_no_command_is_printed_that_would_not_start_the_plan(headrace: Headrace) -> None:
    longer = planned(headrace, "llama-2-7b", "--gpu", "h100", "--context", "61000")
    assert longer["is_met"] is True
    assert longer["command"] is None
    assert planned(headrace, "llama-2-7b", "--gpu", "h100", "--kv-dtype", "fp32")["command"] is None
    rounded = planned(headrace, "llama-3-8b", "--gpu", "h100", "--dtype", "fp8", "--memory-fraction", "0.5", "--count", "1")["command"]
    assert "--gpu-memory-utilization 0.5 --kv-cache-dtype bfloat16 --quantization fp8" in str(rounded)


def test_more_requests_together_than_prompts_leave_time_for_are_not_planned(headrace: Headrace) -> None:
    """Steps of a CPU are short: where hundreds decode, no room is left in them for prompts."""
    lengths = ("--requests-per-second", "0.1", "--input-len", "100", "--output-len", "20", "--memory-fraction", "1")
    found = planned(headrace, "llama-3-8b", "--gpu", "cpu", *lengths)
    assert found["replicas"] == 1
    assert found["capacity_tokens_per_s"] > 7  # type: ignore[operator]


def test_a_weaker_wish_of_the_users_takes_no_more_devices(headrace: Headrace) -> None:
    def devices(*wish: str) -> object:
        return planned(headrace, "llama-3-8b", "--gpu", "h100", "--requests-per-second", "20", "--context", "640", *wish)["devices"]

    assert devices("--tokens-per-user", "0.05") == devices("--tokens-per-user", "5") == devices() == 1


def test_a_day_has_a_mean_and_a_peak(headrace: Headrace) -> None:
    lengths = ("--input-len", "500", "--output-len", "200")
    flat, peaked = (
        planned(headrace, "llama-3-8b", "--gpu", "h100", "--requests-per-day", "1e6", "--peak", peak, *lengths) for peak in ("1", "6")
    )
    assert flat["demand_tokens_per_s"] == pytest.approx(1e6 * 200 / 86_400)
    assert peaked["demand_tokens_per_s"] == pytest.approx(6e6 * 200 / 86_400)
    assert peaked["price_per_day"] == pytest.approx(24 * peaked["price_per_hour"])  # type: ignore[operator]
    ratio = peaked["price_per_day"] / flat["price_per_day"]  # type: ignore[operator]
    assert ratio > 1
    paid = [each["cost_per_1m_at_demand"] - each["egress_per_1m_tokens"] for each in (flat, peaked)]  # type: ignore[operator]
    assert paid[1] / paid[0] == pytest.approx(ratio, rel=1e-3), "devices are there for the peak, and the mean pays for them"


def test_prices_are_written_in_the_order_of_the_help(headrace: Headrace, tmp_path: Path) -> None:
    shown = " ".join(headrace("plan", "--help").stdout.replace("│", " ").split())
    assert "egress_per_gb, storage_per_gb_month, then [gpu] and h100 = 2.5" in shown
    file = tmp_path / "prices.toml"
    file.write_text("egress_per_gb = 0.05\nstorage_per_gb_month = 0.02\n[gpu]\nh100 = 2.5\n")
    assert planned(headrace, "llama-3-8b", "--gpu", "h100", "--count", "1", "--prices", str(file))["price_per_hour"] == 2.5


def test_a_shape_of_an_unknown_family_is_said_to_be_read_as_llama(headrace: Headrace, tmp_path: Path) -> None:
    config = {"model_type": "brand_new", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "max_position_embeddings": 64}))
    assert "the shape is read as Llama's" in headrace("plan", str(tmp_path), "--gpu", "h100").stdout


@pytest.mark.parametrize(
    ("arguments", "is_met"),
    [
        (["--requests-per-second", "1e9"], True),
        (["--requests-per-second", "1e-6"], True),
        (["--users", "1000000000", "--tokens-per-user", "30"], True),
        (["--count", "1000000"], True),
        (["--context", "67108864"], False),
        (["--memory-fraction", "0.01"], True),
        (["--slo", "tpot=1000000s,ttft=0.001ms"], False),
    ],
)
def test_the_largest_numbers_that_are_accepted_give_finite_figures(headrace: Headrace, arguments: list[str], is_met: bool) -> None:
    found = planned(headrace, "llama-3-8b", "--gpu", "h100", *arguments)
    assert found["is_met"] is is_met
    shown = headrace("plan", "llama-3-8b", "--gpu", "h100", "--layouts", "all", *arguments).stdout
    assert not re.search(r"\b(inf|nan)\b", shown)
    assert ("No layout serves this:" in shown) is not is_met


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
    assert embedding["capacity_tokens_per_s"] >= 256_000  # type: ignore[operator]
    assert "kv_bytes_per_token" not in embedding


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
        (
            ["llama-70b", "--users", "10", "--tokens-per-user", "nan"],
            2,
            "--tokens-per-user: expected a number from 0.001 to 1e+06, got nan",
        ),
        (["llama-70b", "--requests-per-second", "0"], 2, "--requests-per-second: expected a number from 1e-06 to 1e+09, got 0"),
        (["llama-70b", "--users", "10", "--tokens-per-user", "10", "--requests-per-second", "500"], 2, "an answer must have at least 1"),
        (["llama-70b", "--layouts", "some"], 2, "--layouts: 'some' is not known. One of runnable, all."),
        (["llama-70b", "--requests-per-day", "5", "--requests-per-second", "5"], 2, "give it or --requests-per-second, not both"),
        (["llama-70b", "--peak", "2"], 2, "--peak needs a load"),
        (["llama-70b", "--requests-per-day", "9", "--peak", "0.5"], 2, "--peak: expected a number from 1 to 1000, got 0.5"),
        (
            ["llama-70b", "--context", "300", "--input-len", "100", "--output-len", "200"],
            2,
            "--context: it is --input-len and --output-len",
        ),
        (["llama-70b", "--context", "300", "--input-len", "300"], 2, "--input-len: 300 must be less than the context's 300"),
        (["llama-70b", "--prices", "/nowhere.toml"], 3, "/nowhere.toml: cannot be read"),
        (["llama-70b", "--gpu", ","], 2, "names no device"),
        (["bge-m3", "--users", "50"], 2, "bge-m3 generates nothing"),
        (["bge-m3", "--slo", "tpot=1ms"], 2, "it has no tpot"),
        (["70B"], 3, "Did you mean llama-3-70b?"),
        (["llama-70b", "--slo", "tpot=40ms,tpot=50ms"], 2, "--slo: tpot is given twice"),
        (["llama-70b", "--slo", f"tpot={'9' * 400}s"], 2, "--slo: tpot must be from 1e-06 to 1e+06 s, got inf s"),
        (["llama-70b", "--plot", "plan.png"], 2, "--plot: an SVG is written, so the file must end in .svg, got plan.png"),
        (["bge-m3", "--plot", "plan.svg"], 2, "--plot: bge-m3 generates nothing"),
        (
            ["llama-3-405b", "--gpu", "rtx4090", "--count", "2", "--layouts", "all", "--plot", "plan.svg"],
            3,
            "nothing is there to draw: weights of 811.7 GB",
        ),
        (["llama-70b", "--requests-per-second", "1e300"], 2, "--requests-per-second: expected a number from 1e-06 to 1e+09, got 1e+300"),
        (["llama-70b", "--users", "1", "--tokens-per-user", "1e300"], 2, "--tokens-per-user: expected a number from 0.001 to 1e+06"),
        (["llama-70b", "--users", f"1{'0' * 29}", "--tokens-per-user", "1"], 2, "--users"),
        (["llama-70b", "--memory-fraction", "1e-320"], 2, "--memory-fraction: expected a share from 0.01 to 1"),
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
    text = file.read_text()
    for drawn in ("h100, TP", "l40s, TP", "sequences decoded together, per replica"):
        assert f"<!-- {drawn}" in text, drawn
    assert "stroke-dasharray" in text, "the goal is a broken line"


def test_a_plot_without_matplotlib_says_how_to_get_it(headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = headrace("plan", "llama-3-8b", "--gpu", "h100", "--plot", str(tmp_path / "plan.svg"))
    assert done.returncode == 3
    assert "pip install 'headrace[plots]'" in done.stderr
