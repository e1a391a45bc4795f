"""Tests the peers' page: who is compared with whom, in which direction, and what is said about cells that are missing or failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench import machine
from bench.machine import this_machine
from bench.peers import cells, report, run
from bench.peers.cells import Cell, Outcome, save
from bench.peers.compressed import pack_nibbles
from bench.peers.engines import CannotRun, Worker
from bench.peers.rows import Ask, Figure, measure, measure_in_turns, row_names
from headrace.tensor.host.cpu_features import CpuFeatures

pytestmark = pytest.mark.pure

ENVIRONMENT = {"cpu": "a CPU", "num_cpus": 2, "time": "2026-01-02T03:04:05+00:00", "commit": "abc"}


def outcome(value: float | None, *, error: str = "", unit: str = "tok/s") -> Outcome:
    facts = {"weights": 1e9, "kv_numbers_per_token": 1000}
    return Outcome(
        value=value, unit=unit, setting={}, environment=ENVIRONMENT, read_bandwidth_bytes_per_s=2e10, error=error, facts=facts
    )  # fmt: skip


def rounds(*values: float | None) -> Mapping[int, Outcome]:
    return {number: outcome(value) for number, value in enumerate(values)}


def test_the_best_peer_of_the_same_round_is_what_counts() -> None:
    engines = {"headrace": rounds(30, 30), "vllm": rounds(10, 40), "openvino": rounds(20, 10)}
    assert report.advantages("decode-1", engines, report.PEERS) == [1.5, 0.75]
    assert report.advantages("startup", engines, report.PEERS) == pytest.approx([1 / 3, 1 / 3])


def test_a_round_that_headrace_failed_counts_as_nothing_and_one_that_every_peer_failed_is_no_comparison() -> None:
    engines = {"headrace": rounds(30, None, 30), "vllm": rounds(10, 10, None)}
    assert report.advantages("decode-1", engines, report.PEERS) == [3.0, 0.0]
    assert report.advantages("decode-1", {"headrace": rounds(1)}, report.PEERS) == []
    assert math.isnan(report._against_best_peer("decode-1", {}, "vllm"))


def test_model_bandwidth_utilisation_counts_weights_and_contexts() -> None:
    step_bytes = 1e9 * 2 + 4 * 160 * 1000 * 2
    assert report.mbu("decode-4", "bf16", rounds(40.0)) == pytest.approx(step_bytes * 10 / 2e10)
    assert report.mbu("prefill-512", "bf16", rounds(40.0)) is None
    assert report.mbu("decode-4", "bf16", rounds(None)) is None


def test_a_section_names_what_failed_and_who_is_missing() -> None:
    table: report.Table = {
        "decode-1": {"headrace": rounds(30, 32, 31), "vllm": {0: outcome(None, error="no such kernel")}},
        "memory": {"headrace": {0: outcome(3e9, unit="bytes")}},
    }
    text = "\n".join(report.section("llama-1.1b", "bf16", table))
    assert "| decode-1 | 31 [30, 32] | failed | - | - |" in text
    assert "| memory | 3 GB | - |" in text
    assert "Not measured: llama.cpp, openvino." in text
    assert "- decode-1, vllm: no such kernel" in text


def test_what_falls_short_of_a_goal_says_so_in_the_shape_that_has_goals() -> None:
    columns = {"headrace": rounds(9.5, 9.0, 12.0), "vllm": rounds(10, 10, 10), "ceiling": rounds(10, 10, 10)}
    table: report.Table = {"decode-1": columns}
    line = next(line for line in report.section("llama-1.1b", "bf16", table) if line.startswith("| decode-1"))
    assert "| **0.95** of 1.00 [0.90, 1.20] (3) | 0.95 [0.90, 1.20] (3) | 0.95 |" in line
    assert "**0.95** of 1.10" in "".join(report.section("llama-1.1b", "int8", table))
    assert "**" not in "".join(report.section("qwen2-0.4b", "bf16", table))
    slow = "".join(report.section("llama-1.1b", "bf16", {"decode-1": {"headrace": rounds(5.0)}, "decode-8": {"headrace": rounds(5.0)}}))
    assert slow.count("** of 0.85") == 1, "one stream alone has a goal of bandwidth"


def test_the_committed_pages_are_those_of_the_committed_cells() -> None:
    found = report.tables()
    assert report.PAGE.read_text(encoding="utf-8") == report.page(found), "run python -m bench.peers.report"
    assert report.TABLES.read_text(encoding="utf-8") == report.details(found), "run python -m bench.peers.report"


def test_machines_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [Cell(machine, "llama-1.1b", "bf16", "headrace", "decode-1", 0) for machine in ("ours", "theirs")]
    assert kept[0].file != kept[1].file
    monkeypatch.setattr(report, "load_all", lambda: zip(kept, [outcome(30), outcome(60)], strict=True))
    found = report.tables()
    values = {machine: tables["llama-1.1b", "bf16"]["decode-1"]["headrace"][0].value for machine, tables in found.items()}
    assert values == {"ours": 30, "theirs": 60}


def test_methods_do_not_mix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cells, "FOLDER", tmp_path)
    kept = [Cell("ours", "llama-1.1b", "bf16", "headrace", "decode-1", number) for number in range(2)]
    old, new = outcome(30), replace(outcome(60), method=cells.METHOD)
    for cell, measured in zip(kept, (old, new), strict=True):
        save(cell, measured)
    assert [cell.is_done for cell in kept] == [False, True]
    monkeypatch.setattr(report, "load_all", lambda: cells.load_all(tmp_path))
    found = report.tables()["ours"]["llama-1.1b", "bf16"]["decode-1"]["headrace"]
    assert {number: outcome.value for number, outcome in found.items()} == {1: 60}


def test_the_ceiling_has_a_method_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [Cell("ours", "llama-1.1b", "bf16", engine, "decode-1", 0) for engine in ("headrace", "ceiling")]
    found = [replace(outcome(30), method=cells.method_of(cell.engine)) for cell in kept]
    assert found[0].method != found[1].method
    monkeypatch.setattr(report, "load_all", lambda: zip(kept, found, strict=True))
    table = report.tables()["ours"]["llama-1.1b", "bf16"]
    assert set(table["decode-1"]) == {"headrace", "ceiling"}
    assert "measured by method" not in "".join(report.section("llama-1.1b", "bf16", table))


def test_headrace_is_held_against_the_ceiling_that_was_asked_in_turns() -> None:
    engines = {"headrace": rounds(30, 30), "ceiling": rounds(40, 60)}
    assert report.shares_of_ceiling("decode-1", engines) == [0.75, 0.5]
    in_turns = {0: replace(outcome(40), load={"headrace": 36.0}), 1: outcome(60)}
    assert report.shares_of_ceiling("decode-1", {**engines, "ceiling": in_turns}) == [0.9]
    failed = {**in_turns, 2: replace(outcome(40), load={"headrace": None})}
    assert report.shares_of_ceiling("decode-1", {**engines, "ceiling": failed}) == [0.9, 0.0]


@pytest.mark.parametrize(("row", "words"), [("prefill-512", "no memory"), ("decode-2", "no memory"), ("mixed-32", "no memory")])
def test_the_ceiling_stands_where_headrace_fails_beside_it(row: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Figure] = []
    turn = SimpleNamespace(
        shape="s", precision="p", seed=1, wanted=[row], keep=lambda _row, _setting, work: kept.append(work())
    )  # fmt: skip

    def fail(prompts: list[list[int]], max_tokens: list[int]) -> float:
        raise CannotRun(words)

    def answer(prompts: list[list[int]], max_tokens: list[int]) -> float:
        return float(sum(max_tokens))

    run.take_ceiling_turn(
        cast("run.Turn", turn), cast("Worker", SimpleNamespace(ask=answer, setting={})), cast("Worker", SimpleNamespace(ask=fail))
    )
    assert kept[0].value == measure(row, answer, seed=1).value
    assert kept[0].load == {"headrace": None}
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("row", row_names())
def test_two_engines_in_turns_are_asked_the_same_and_give_what_each_gives_alone(row: str) -> None:
    asked: list[tuple[str, list[list[int]], list[int]]] = []

    def engine(name: str, speed: float) -> Ask:
        def ask(prompts: list[list[int]], max_tokens: list[int]) -> float:
            asked.append((name, prompts, max_tokens))
            return speed * (len(prompts) + sum(max_tokens))

        return ask

    pair = measure_in_turns(row, engine("a", 1.0), engine("b", 2.0), seed=3)
    assert [name for name, *_ in asked] == ["a", "b"] * (len(asked) // 2)
    assert [rest for _, *rest in asked[::2]] == [rest for _, *rest in asked[1::2]]
    assert pair == (measure(row, engine("a", 1.0), seed=3), measure(row, engine("b", 2.0), seed=3))


@pytest.mark.parametrize(
    ("cpu", "flags", "name"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", {"avx512f"}, "intel-xeon-2.50ghz-25-1-avx512-2cpus"),
        ("AMD EPYC", set(), "amd-epyc-25-1-avx2-2cpus"),
        ("AMD Ryzen 7 CPU", {"avx_vnni"}, "amd-ryzen-7-25-1-avx2-vnni-2cpus"),
    ],
)
def test_a_machine_is_named_for_a_folder(cpu: str, flags: set[str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: {cpu}\n" * 2)
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    monkeypatch.setattr(machine, "environment", lambda: SimpleNamespace(cpu=cpu, num_cpus=2))
    monkeypatch.setattr(machine, "read_cpu_features", lambda: CpuFeatures("x86_64", frozenset({"avx2", *flags})))
    assert this_machine.__wrapped__() == name


def test_every_row_asks_for_what_it_says() -> None:
    def ask(prompts: list[list[int]], max_tokens: list[int]) -> float:
        asked.append((len(prompts), sum(map(len, prompts)), sum(max_tokens)))
        return 1.0 + 0.5 * sum(max_tokens)

    for row in row_names():
        asked: list[tuple[int, int, int]] = []
        value = measure(row, ask, seed=3).value
        kind, _, number = row.partition("-")
        if kind == "prefill":
            assert set(asked) == {(1, int(number), 1)}
            assert value == int(number) / 1.5
        elif kind == "decode":
            streams = int(number)
            assert asked == [(streams, min(128 * streams, 1024), count * streams) for count in (1, 64, 1)]
            assert value == pytest.approx(2.0), "half a second per token, whatever the prompts took"
        else:
            assert asked[0][0] == 32


def test_nibbles_are_packed_lowest_first() -> None:
    import torch

    words = pack_nibbles(torch.tensor([[-8, -7, 0, 7, -8, -8, -8, 7]], dtype=torch.int8))
    assert words.tolist() == [[0xF000F810 - (1 << 32)]]


def test_the_page_opens_with_one_line_of_wins_and_losses_per_machine_shape_and_precision() -> None:
    won: report.Table = {"decode-1": {"headrace": rounds(30, 10, 20), "vllm": rounds(10, 10, 10)}, "decode-2": {"headrace": rounds(1)}}
    lost: report.Table = {"startup": {"headrace": rounds(4), "vllm": rounds(1)}}
    lines = list(report.grid({"here": {("llama-1.1b", "int8"): won, ("llama-1.1b", "int4"): lost}}))
    assert lines[0] == "| machine, shape, precision | decode-1 | decode-2 | startup |"
    assert lines[2] == "| [here](../bench/peers/tables.md#here), llama-1.1b, int8 | 2.00 | - | - |"
    assert lines[3] == "| [here](../bench/peers/tables.md#here), llama-1.1b, int4 | - | - | **0.25** |"
    assert lines[4].strip() == "1 wins, 1 losses (bold); 1 of them are of one round, and vLLM took part in 2."
    assert [report.is_win(ratio) for ratio in (0.994, 0.996)] == [False, True]
    marked: report.Table = {"startup": {"headrace": rounds(4), "vllm": {0: replace(outcome(1), remark="cold")}}}
    assert (
        list(report.grid({"a.b": {("llama-1.1b", "int4"): marked}}))[2]
        == "| [a.b](../bench/peers/tables.md#ab), llama-1.1b, int4 | **0.25*** |"
    )


def test_a_remark_on_a_cell_is_printed_below_its_table() -> None:
    cold = {0: replace(outcome(30), remark="its file was not in the system's cache")}
    text = "\n".join(report.section("llama-1.1b", "bf16", {"startup": {"llama.cpp": cold}}))
    assert "- startup, llama.cpp, round 0: its file was not in the system's cache." in text
    assert "commit" not in text
