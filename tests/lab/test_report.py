"""Tests reports: strict JSON whatever happened, and facts about where a figure came from."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from headrace.lab import environment as facts
from headrace.lab.metrics import LoadRecord, Slo, summarize
from headrace.lab.report import failures, lines, notes, to_plain, write_json

pytestmark = pytest.mark.pure

GOOD = LoadRecord(intended_s=0.0, sent_s=0.0, chunk_s=(0.1, 0.2), end_s=0.2, prompt_tokens=3, output_tokens=2, status=200)
BAD = LoadRecord(intended_s=0.0, sent_s=0.0, end_s=1.0, status=429, error="429 overloaded")


def test_report_with_failures_is_strict_json(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "result.json"
    write_json(file, {"report": summarize([GOOD, BAD], Slo(ttft_s=1.0)), "records": [GOOD, BAD]})
    data = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    ttft = data["report"]["ttft_s"]
    assert (ttft["max"], ttft["mean"], ttft["failed"]) == (None, None, 1)
    assert "inf" not in file.read_text().lower()
    assert data["report"]["errors"] == {"429 overloaded": 1}
    assert data["records"][0]["chunk_s"] == [0.1, 0.2]
    assert list(file.parent.iterdir()) == [file]


NAMES = ["p50", "p90", "p95", "p99", "p99.9"]


@pytest.mark.parametrize(("count", "known"), [(3, NAMES[:1]), (19, NAMES[:2]), (20, NAMES[:3]), (100, NAMES[:4]), (1000, NAMES)])
def test_json_has_no_quantile_of_too_few_samples(count: int, known: list[str]) -> None:
    """It had an interpolated P99.9 of three."""
    data = json.loads(json.dumps(to_plain(summarize([GOOD] * count))))
    for measure in (data["ttft_s"], data["client_lag_s"]):
        assert list(measure["quantiles"]) == list(measure["intervals"]) == NAMES
        for name, value in measure["quantiles"].items():
            assert (value is not None) == (measure["intervals"][name] is not None) == (name in known)


def test_plain_values_of_all_kinds() -> None:
    assert to_plain({"a": (math.nan, -math.inf, 1.5), 2: None}) == {"a": [None, None, 1.5], "2": None}


def test_lines_name_every_measure_and_failure() -> None:
    text = "\n".join(lines(summarize([GOOD, BAD], Slo(ttft_s=1.0))))
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "P99.9", "goodput", "2 / 1 / 1", "1 x 429 overloaded", "-  (1 of 2 failed)"):
        assert word in text
    assert "inf" not in text
    assert "VOID" not in text


def test_brackets_are_said_to_be_what_they_are_and_few_samples_show_no_tail() -> None:
    few = list(lines(summarize([GOOD] * 3)))
    assert any("95 % confidence interval of that percentile" in line for line in few)
    assert [line.split() for line in few if line.startswith("P99.9 TTFT")] == [
        ["P99.9", "TTFT", "(ms):", "-", "(1000", "samples", "needed)"]
    ]
    assert any(line.startswith("P50 TTFT") and "[100.00, 100.00]" in line for line in few)
    many = "\n".join(lines(summarize([GOOD] * 1000)))
    assert "needed" not in many
    assert "P99.9 TTFT (ms):                         100.00  [100.00, 100.00]" in many


def test_a_percentile_shows_where_its_interval_meets_failures() -> None:
    text = list(lines(summarize([*[GOOD] * 98, BAD, BAD], Slo(ttft_s=0.01))))
    assert [line.split(":")[1].strip() for line in text if line.startswith(("P95 TTFT", "P99 TTFT"))] == [
        "100.00  [100.00, failed]",
        "-  (2 of 100 failed)",
    ]
    assert [line.split(":")[1].strip() for line in text if "goodput" in line] == ["no request met the goals"]


def test_failed_requests_are_no_share_of_the_gaps_of_all_requests() -> None:
    text = list(lines(summarize([GOOD, replace(BAD, chunk_s=(0.1, 0.2, 0.3))])))
    assert [line.split(":")[1].strip() for line in text if line.startswith(("Mean ITL", "Mean E2EL"))] == [
        "-  (1 request failed)",
        "-  (1 of 2 failed)",
    ]


def test_failures_are_counted_by_kind_with_the_words_of_the_first() -> None:
    other = LoadRecord(intended_s=-1.0, sent_s=0.0, end_s=1.0, status=404, error="404 model_not_found", detail="tiny is served")
    assert list(failures(summarize([BAD, other, BAD]))) == [
        "3 of 3 requests failed:",
        "  2 x 429 overloaded",
        "  1 x 404 model_not_found",
        "  The first one: 404 model_not_found: tiny is served",
    ]


def test_a_mean_of_no_samples_is_a_dash() -> None:
    one = replace(GOOD, chunk_s=(0.1,), output_tokens=1)
    assert [line.split() for line in lines(summarize([one])) if line.startswith("Mean TPOT")] == [["Mean", "TPOT", "(ms):", "-"]]


def test_a_burst_that_took_the_client_long_to_send_is_noted() -> None:
    """The last of 500 requests was sent 286 ms late, which stood in TTFT and nowhere else."""
    burst = [replace(GOOD, sent_s=delay_s, due_s=delay_s) for delay_s in (0.0, 0.001, 0.006)]
    [note] = notes(summarize(burst), has_shared_prefix=False)
    assert note.startswith("The client took 6 ms to send a burst, more than 5% of the median TTFT.")
    assert "Time to send a burst (ms):               6.00" in list(lines(summarize(burst)))
    assert not list(notes(summarize(burst[:2]), has_shared_prefix=False))
    apart = [replace(record, intended_s=record.sent_s or 0.0, due_s=None) for record in burst]
    assert summarize(apart).burst_send_s == 0.0
    placed = [replace(record, sendable_s=record.sent_s) for record in burst]
    assert summarize(placed).burst_send_s == 0.0, "waiting for one of max_concurrency places is not the client's time"


def test_prompts_that_the_server_has_seen_before_are_noted() -> None:
    report = summarize([replace(GOOD, prompt_tokens=100, cached_tokens=11)])
    [note] = notes(report, has_shared_prefix=False)
    assert note.startswith("11 of 100 prompt tokens were cached")
    assert not list(notes(report, has_shared_prefix=True))
    assert not list(notes(summarize([replace(GOOD, prompt_tokens=100, cached_tokens=10)]), has_shared_prefix=False))


@pytest.mark.process
def test_environment_says_where_it_was(tmp_path: Path) -> None:
    found = facts.environment()
    assert found.num_cpus >= 1
    assert len(found.load_average) == 3
    assert "headrace" in found.versions
    assert found.time.endswith("+00:00")
    assert facts.commit_of(tmp_path) is None, "a folder outside a checkout"


@pytest.fixture
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "commit_of", lambda folder: None)


@pytest.mark.usefixtures("no_git")
def test_command_is_kept_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/headrace", "bench", "--api-key", "secret", "--api-key=secret", "--seed", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert facts.environment().command == ("headrace", "bench", "--api-key", "***", "--api-key=***", "--seed", "1")


@pytest.mark.usefixtures("no_git")
@pytest.mark.parametrize(("module", "named"), [("bench.run", "bench.run"), ("headrace.__main__", "headrace")])
def test_command_of_a_module_is_what_one_would_type(module: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/run.py", "--rounds", "2"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None))
    assert facts.environment().command == ("python", "-m", named, "--rounds", "2")


@pytest.mark.process
def test_bandwidth_script_that_fails_is_no_bandwidth_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "bandwidth.py"
    for text, why in (
        ("import sys; print('no numpy', file=sys.stderr); raise SystemExit(3)", "status 3: no numpy"),
        ("print('fast')", "something else"),
        ("print('[1]')", "something else"),
        ("", "something else"),
    ):
        script.write_text(text)
        assert facts.measure_bandwidth(script) is None
        with pytest.raises(facts.BandwidthUnknown, match=why):
            facts.read_bandwidth(script)
    assert facts.measure_bandwidth(None) is None
    with pytest.raises(facts.BandwidthUnknown, match="from a checkout"):
        facts.read_bandwidth(None)
    script.write_text("""print('{"read_bytes_per_s": 5e10, "pattern": "sum"}')""")
    assert facts.measure_bandwidth(script) == facts.read_bandwidth(script) == facts.ReadBandwidth(5e10, "sum")
