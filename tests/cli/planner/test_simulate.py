"""Tests `headrace simulate` as it is typed."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from headrace.bundled import bundled_path
from headrace.engine.config import EngineConfig
from headrace.lab.simulate.step_times import FittedLatency, StepFile, write_steps
from headrace.policy.placement.roofline import load_seconds
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure

SITE = """
models:
  - name: chat
    replicas: 2
    engine: {model: llama-3-8b, max_num_seqs: 16}
gateway:
  admission: {max_wait_s: 2.0}
"""

QUICK = ("--gpu", "h100", "--duration", "5", "--input-len", "128", "--output-len", "16")


def test_a_device_and_a_name_of_the_catalogue_are_enough(headrace: Headrace) -> None:
    done = headrace("simulate", "--model", "llama-3-8b", "--load", "5", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "Simulated: 1 x llama-3-8b on TP 1 h100" in done.stdout
    assert "Median" not in done.stdout
    assert "P50 TTFT (ms)" in done.stdout


def test_a_file_of_serve_gives_replicas_limits_and_admission(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    lengths = ("--gpu", "h100", "--duration", "8", "--input-len", "128", "--output-len", "400")
    done = headrace("simulate", str(file), "--load", "2,60", *lengths, "--json", "--goodput", "ttft:500")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["site"].startswith("2 x llama-3-8b")
    assert found["price_per_hour"] == 2 * 3.49
    few, many = (run["report"] for run in found["runs"])
    assert few["errors"] == {}
    assert many["errors"]["refused"] > 0
    assert few["goodput"] == pytest.approx(few["request_throughput"])


def test_replicas_come_with_the_load_and_each_change_has_a_reason(headrace: Headrace) -> None:
    load = ("--load", "10", "--duration", "200", "--spike", "50:60:20", "--load-time", "10", "--autoscale", "1:4", "--goodput", "ttft:300")
    site = ("simulate", "--model", "llama-3-8b", "--gpu", "h100", "--input-len", "2000", "--output-len", "16")
    done = headrace(*site, *load)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Autoscaling: \d\.\d\d replica-hours", done.stdout)
    assert re.search(r" s  [234] replicas: \w+", done.stdout)
    scaling = json.loads(headrace(*site, *load, "--json").stdout)["runs"][0]["scaling"]
    assert max(change["num_replicas"] for change in scaling["changes"]) > 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--autoscale", "4:1"), "is not MIN:MAX"),
        (("--autoscale", "0:0"), "is not MIN:MAX"),
        (("--autoscale", "1"), "is not MIN:MAX"),
        (("--autoscale", "1:4", "--kill", "2:0:1"), "without --kill"),
        (("--autoscale", "1:4", "--load-time", "-1"), "--load-time"),
    ],
)
def test_scaling_that_cannot_be_simulated_is_refused(headrace: Headrace, flags: tuple[str, ...], words: str) -> None:
    done = headrace("simulate", "--model", "llama-3-8b", "--load", "5", *QUICK, *flags)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_a_context_longer_than_the_cache_is_shortened_to_it(headrace: Headrace) -> None:
    done = headrace("simulate", "--model", "llama-3-8b", "--gpu", "rtx4090", "--load", "1", "--duration", "5", "--output-len", "8")
    assert done.returncode == 0, done.stderr
    assert "on TP 1 rtx4090" in done.stdout


def test_deaths_and_spikes_are_taken(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    done = headrace("simulate", str(file), "--load", "5", *QUICK, "--kill", "2:0:1", "--spike", "1:2:4", "--json")
    assert done.returncode == 0, done.stderr
    [run] = json.loads(done.stdout)["runs"]
    report, events = run["report"], run["events"]
    assert report["finished"] == report["offered"]
    assert [(each["event"], each["begin_s"], each["end_s"]) for each in events] == [
        ("spike of 4 times the load", 1.0, 3.0),
        ("death of replica 0", 2.0, 3.0),
    ]
    assert [sum(each[span]["requests"] for span in ("before", "during", "after")) for each in events] == [report["offered"]] * 2


def test_a_replica_without_another_is_back_after_its_load_time_or_has_a_standby(headrace: Headrace) -> None:
    one = ("simulate", "--model", "llama-3-8b", "--load", "20", *QUICK, "--kill", "2:0")
    loading = headrace(*one, "--load-time", "1.5", "--goodput", "ttft:0.001")
    assert "death of replica 0, from 2 to 3.5 s" in loading.stdout
    assert "no request met the goals" in loading.stdout
    assert not re.search(r"\b(inf|nan)\b", loading.stdout)
    kept = headrace(*one, "--load-time", "1.5", "--standby", "1", "--json")
    found = json.loads(kept.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["runs"][0]["report"]["errors"] == {}
    assert ", 1 standby replica, " in found["site"]
    assert found["price_per_hour"] == 2 * 3.49, "a standby costs what the replica costs"
    [by_bytes] = json.loads(headrace(*one, "--json").stdout)["runs"]
    assert by_bytes["events"][0]["end_s"] == pytest.approx(2 + load_seconds(16.06e9), rel=0.01)
    assert by_bytes["report"]["errors"] == {}, "requests are held until it is back"
    assert by_bytes["report"]["finished"] == by_bytes["report"]["offered"]


def test_the_death_that_the_page_shows_is_what_is_simulated(headrace: Headrace) -> None:
    text = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
    shown = re.search(r"^    headrace (simulate [^\n]* --kill 20:0:15)\n\n(.*?)\n\n(?! )", text, re.MULTILINE | re.DOTALL)
    assert shown
    done = headrace(*shown.group(1).split())
    assert textwrap.dedent(shown.group(2)) in done.stdout, done.stdout


def test_one_load_is_drawn_over_the_time(headrace: Headrace, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 100 * n, "input_length": 64, "output_length": 8}) + "\n" for n in range(20)))
    file = tmp_path / "drawn.svg"
    done = headrace("simulate", "--model", "llama-3-8b", "--gpu", "h100", "--trace", str(trace), "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert "time since the start (s)" in file.read_text()


def test_a_trace_is_replayed(headrace: Headrace, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"timestamp": 100 * n, "input_length": 600, "output_length": 8, "hash_ids": [1]}) + "\n" for n in range(20))
    )
    done = headrace("simulate", "--model", "llama-3-8b", "--gpu", "h100", "--trace", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["runs"][0]["report"]
    assert report["finished"] == 20
    assert report["cached_tokens"] == 19 * 512


def test_the_trace_that_is_shipped_is_simulated(headrace: Headrace) -> None:
    """The documentation says these figures of a live server, too."""
    trace = Path(__file__).parents[3] / "examples" / "conversations.jsonl"
    assert trace.stat().st_size < 100_000
    done = headrace("simulate", "--gpu", "h100", "--trace", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["runs"][0]["report"]
    assert (report["finished"], report["prompt_tokens"], report["cached_tokens"]) == (132, 82_619, 53_888)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--load", "5"], 2, "Give --gpu"),
        (["--gpu", "h100", "--steps", "x.json", "--load", "5"], 2, "exactly one of them"),
        (["--gpu", "h100"], 2, "Give --load"),
        (["--gpu", "h100", "--load", "5,x"], 2, "'5,x' is no list"),
        (["--gpu", "h100", "--load", "-5"], 2, "is no list"),
        (["--gpu", "h100", "--load", "5", "--duration", "0"], 2, "--duration"),
        (["--gpu", "h100", "--load", "5", "--kill", "3"], 2, "is not SECOND:REPLICA:BACK"),
        (["--gpu", "h100", "--load", "5", "--kill", "3:0", "--load-time", "-1"], 2, "--load-time: -1 is not a number of seconds"),
        (["--gpu", "h100", "--load", "5", "--standby", "1"], 2, "--standby: it has an effect where a replica dies"),
        (["--gpu", "h100", "--load", "5", "--kill", "3:0", "--standby", "5"], 2, "--standby: 5 are more than the 1 death of --kill"),
        (["--gpu", "h100", "--load", "5", "--kill", "3:0:1", "--load-time", "5"], 2, "--load-time: it is for replicas whose --kill"),
        (["--gpu", "h100", "--load", "5", "--kill", "3:7:1"], 2, "names replica 7; there are replicas 0 to 0"),
        (["--gpu", "h100", "--load", "5", "--spike", "1:2:0"], 2, "no factor above 0"),
        (["--gpu", "h100", "--load", "5", "--tp", "3"], 3, "no layout of 3 devices"),
        (["--model", "llama-3-405b", "--gpu", "h100", "--tp", "1", "--load", "5"], 3, "do not fit"),
        (["--steps", "/nowhere.json", "--load", "5"], 3, "/nowhere.json"),
        (["--gpu", "h100", "--trace", "/nowhere.jsonl"], 3, "/nowhere.jsonl: cannot be read"),
        (["--gpu", "h100", "--load", "5", "--input-len", "0"], 2, "must be positive"),
        (["--gpu", "h100", "--load", "1000000"], 2, "60,000,000 requests; one simulation takes 1,000,000"),
        (["--gpu", "h100", "--load", "10", "--spike", "30:1:1000000"], 2, "one simulation takes"),
        (["--gpu", "h100", "--trace", "/dev/null"], 2, "No request arrives"),
        (["--gpu", "h100", "--trace", "/dev/null", "--spike", "1:1:2"], 2, "--spike: a trace has its own times"),
        (["--gpu", "h100", "--trace", "/dev/null", "--duration", "9"], 2, "--duration: a trace has its own times"),
        (["--gpu", "h100", "--load", "1", "--input-len", "100000000"], 2, "prompts of up to 150,000,000 and answers of up to 192"),
        (["--gpu", "h100", "--load", "1", "--input-len", "1400"], 2, "more than the longest context (2,048)"),
        (["--model", "llama-3-8b", "--gpu", "h100", "--load", "5", "--spike", "60:20:5"], 2, "requests arrive for 60 s"),
        (["--model", "llama-3-8b", "--gpu", "h100", "--load", "5", "--kill", "60:0:90"], 2, "requests arrive for 60 s"),
        (["--gpu", "h100", "--tp", "4", "--load", "5"], 3, "4: 6 query heads do not divide by it"),
        (["--model", "bge-m3", "--gpu", "h100", "--load", "5"], 2, "bge-m3 generates nothing"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(headrace: Headrace, arguments: list[str], code: int, named: str) -> None:
    done = headrace("simulate", *arguments)
    assert done.returncode == code, done.stderr
    assert named in done.stderr


def test_a_death_after_a_trace_has_been_answered_is_refused(headrace: Headrace, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 100, "input_length": 600, "output_length": 8}) + "\n")
    done = headrace("simulate", "--gpu", "h100", "--trace", str(trace), "--kill", "30:0:1")
    assert done.returncode == 2
    assert "would die at 30 s, after the last answer (0." in done.stderr


def test_what_is_assumed_of_a_device_is_printed(headrace: Headrace) -> None:
    done = headrace("simulate", "--model", "llama-3-8b", "--load", "5", *QUICK)
    assert "tokens of KV (bf16) each, steps of up to 256 sequences and 8,192 tokens" in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("quantization: int4", 0, "int4, "),
        ("dtype: float32", 0, "fp32, "),
        ("kv_cache_dtype: int8", 0, "tokens of KV (int8)"),
        ("memory_fraction: 0.3", 0, " 60,"),
        ("num_kv_blocks: 1000", 0, "16,000 tokens of KV"),
        ("kv_cache_bytes: 2097152000", 0, "16,000 tokens of KV"),
        ("max_num_seqs: 8", 0, "steps of up to 8 sequences and 8,192 tokens"),
        ("num_kv_blocks: 1000000", 3, "num_kv_blocks: 1,000,000 do not fit"),
        ("num_kv_blocks: 1", 3, "num_kv_blocks: 1 block(s)"),
        ("device: cpu", 3, "device: cpu is not what --gpu h100 simulates"),
    ],
)
def test_an_engine_option_of_the_file_is_simulated_or_refused(
    headrace: Headrace, tmp_path: Path, options: str, code: int, said: str
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"models: [{{name: chat, engine: {{model: llama-3-8b, {options}}}}}]")
    done = headrace("simulate", str(file), "--load", "2", "--tp", "1", *QUICK)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_a_file_of_several_models_wants_one_named(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("models: [{name: chat, engine: {model: llama-3-8b}}, {name: big, engine: {model: llama-70b}}]")
    done = headrace("simulate", str(file), "--load", "1", *QUICK)
    assert done.returncode == 2
    assert "has several models, and one is simulated at a time; give one of them: chat, big" in done.stderr
    done = headrace("simulate", str(file), "--model", "big", "--tp", "4", "--load", "1", *QUICK)
    assert "Simulated: 1 x llama-70b" in done.stdout


def test_a_replica_that_this_version_does_not_run_is_simulated_when_it_is_asked_for(headrace: Headrace) -> None:
    done = headrace("simulate", "--model", "llama-70b", "--load", "1", *QUICK)
    assert done.returncode == 3
    assert "weights of 138.0 GB do not fit in 72.0 GB. --tp N simulates a replica on several devices" in done.stderr
    done = headrace("simulate", "--model", "llama-70b", "--tp", "4", "--load", "1", *QUICK)
    assert "Simulated: 1 x llama-70b on TP 4 h100 (replicas on several GPUs are not planned)" in done.stdout


def test_more_replicas_than_can_be_simulated_are_refused(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("models: [{name: chat, replicas: 1000000, engine: {model: llama-3-8b}}]")
    done = headrace("simulate", str(file), "--load", "1", *QUICK)
    assert done.returncode == 2
    assert "1,000,000 replicas; one simulation has at most 256" in done.stderr


def measured(folder: Path, error: float = 0.01, **options: object) -> str:
    latency = FittedLatency(step_s=0.003, row_s=2e-4, context_s=1e-7, prompt_s=5e-5, attention_s=1e-9)
    engine = EngineConfig(model="headrace-tiny", **options).checked()  # type: ignore[arg-type]
    file = folder / "steps.json"
    write_steps(file, StepFile(engine=engine, latency=latency, num_blocks=500, num_steps=50, error=error))
    return str(file)


BRIEF = ("--load", "5", "--duration", "5", "--input-len", "64", "--output-len", "8")


def test_measured_steps_are_those_of_the_engine_that_was_measured(headrace: Headrace, tmp_path: Path) -> None:
    done = headrace("simulate", "--steps", measured(tmp_path, max_num_seqs=7), *BRIEF)
    assert done.returncode == 0, done.stderr
    assert "Simulated: 1 x headrace-tiny, times of" in done.stdout
    assert "whose fit is off by 1.0% in the mean, steps of up to 7 sequences and 512 tokens" in done.stdout
    assert done.stderr == ""


def test_a_fit_that_is_far_off_is_warned_of(headrace: Headrace, tmp_path: Path) -> None:
    done = headrace("simulate", "--steps", measured(tmp_path, error=0.449), *BRIEF)
    assert done.returncode == 0, done.stderr
    assert "Warning: " in done.stderr
    assert "the fit is off by 45%" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--model", "llama-3-8b"], 2, "--model: llama-3-8b has other steps than headrace-tiny"),
        (["--model", "headrace-draft"], 2, "--model: headrace-draft has other steps than headrace-tiny"),
        (["--kill", "2:0"], 2, "--kill: '2:0' does not say when the replica is back: give SECOND:REPLICA:BACK, or --load-time"),
        (["--tp", "2"], 2, "--tp: the steps of --steps are those of the engine that was measured"),
    ],
)
def test_measured_steps_are_of_one_model_and_one_layout(
    headrace: Headrace, tmp_path: Path, arguments: list[str], code: int, named: str
) -> None:
    done = headrace("simulate", "--steps", measured(tmp_path), *arguments, *BRIEF)
    assert done.returncode == code, done.stderr
    assert named in done.stderr


def test_a_file_with_other_options_than_were_measured_is_refused(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("models: [{name: chat, engine: {model: headrace-tiny, quantization: int8}}]")
    done = headrace("simulate", str(file), "--steps", measured(tmp_path), *BRIEF)
    assert done.returncode == 3
    assert "quantization: int8 cannot be simulated with these steps: they were measured with none" in done.stderr


def test_a_folder_of_the_measured_model_is_that_model(headrace: Headrace, tmp_path: Path) -> None:
    done = headrace("simulate", "--steps", measured(tmp_path), "--model", str(bundled_path("headrace-tiny")), *BRIEF)
    assert done.returncode == 0, done.stderr


def test_a_model_that_the_file_does_not_have_is_named(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    done = headrace("simulate", str(file), "--model", "other", "--load", "5", *QUICK)
    assert done.returncode == 2
    assert "no model with engines is named other; there are: chat" in done.stderr
