"""`headrace simulate` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    assert found["price_per_hour"] == 6.0
    few, many = (run["report"] for run in found["runs"])
    assert few["errors"] == {}
    assert many["errors"]["refused"] > 0
    assert few["goodput"] == pytest.approx(few["request_throughput"])


def test_a_context_longer_than_the_cache_is_shortened_to_it(headrace: Headrace) -> None:
    done = headrace("simulate", "--model", "llama-3-8b", "--gpu", "rtx4090", "--load", "1", "--duration", "5", "--output-len", "8")
    assert done.returncode == 0, done.stderr
    assert "on TP 1 rtx4090" in done.stdout


def test_deaths_and_spikes_are_taken(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    done = headrace("simulate", str(file), "--load", "5", *QUICK, "--kill", "2:0:1", "--spike", "1:2:4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["runs"][0]["report"]
    assert report["finished"] == report["offered"]


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
        (["--gpu", "h100", "--trace", "/dev/null", "--plot", "x.svg"], 2, "--plot: a trace has its own times"),
        (["--model", "bge-m3", "--gpu", "h100", "--load", "5"], 2, "bge-m3 generates nothing"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(headrace: Headrace, arguments: list[str], code: int, named: str) -> None:
    done = headrace("simulate", *arguments)
    assert done.returncode == code, done.stderr
    assert named in done.stderr


def test_a_model_that_the_file_does_not_have_is_named(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    done = headrace("simulate", str(file), "--model", "other", "--load", "5", *QUICK)
    assert done.returncode == 2
    assert "no model with engines is named other; there are: chat" in done.stderr
