"""Tests traces: shared beginnings, one line at a time, and what is wrong with a line."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.lab import datasets
from headrace.lab.datasets import LoadRequest, WorkloadShape, make_requests
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import drawn, read_trace
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency

pytestmark = pytest.mark.pure


def written(folder: Path, *entries: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return file


def entry(timestamp: float = 0, prompt: int = 1024, output: int = 4, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, **more}


def test_equal_hashes_are_found_in_the_prefix_cache(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        entry(0, 1200, hash_ids=[1, 2, 3]),
        entry(500, 1200, hash_ids=[1, 2, 4]),
        entry(1000, 1200, hash_ids=[9, 2, 3]),
        entry(1500, 1200),
    )
    latency = FittedLatency(step_s=0.001, row_s=0, context_s=0, prompt_s=1e-5, attention_s=0)
    model = SimulatedModel(EngineConfig(model="simulated", num_kv_blocks=1000).checked(), latency, 1000, 4096)
    records = SimulatedSite([model]).run(read_trace(file))
    assert [record.cached_tokens for record in records] == [0, 1024, 0, 0]


SIZE = 8
"""Tokens of a block here: two of 1,700 ids are equal by chance once in 10^25."""


@given(st.lists(st.tuples(st.lists(st.integers(-3, 3), max_size=5), st.integers(1, 6 * SIZE)), min_size=2, max_size=6), st.integers(0, 9))
def test_prompts_share_exactly_the_blocks_whose_hashes_are_equal(prompts: list[tuple[list[int], int]], seed: int) -> None:
    """What no hash stands for is shared with nothing."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [entry(0, length, hash_ids=hashes, block_size=SIZE) for hashes, length in prompts]
        made = [each.prompt_ids for each in read_trace(written(Path(folder), *lines), seed=seed)]
    assert [len(ids) for ids in made] == [length for _, length in prompts]
    named = [[*hashes, *itertools.repeat(None, 6)] for hashes, _ in prompts]
    blocks = [[ids[begin : begin + SIZE] for begin in range(0, len(ids) - SIZE + 1, SIZE)] for ids in made]
    for (names, found), (other_names, others) in itertools.combinations(zip(named, blocks, strict=True), 2):
        for (name, block), (other_name, other) in itertools.product(
            zip(names, found, strict=False), zip(other_names, others, strict=False)
        ):
            assert (block == other) == (name is not None and name == other_name)


def test_another_seed_makes_other_prompts_within_the_vocabulary(tmp_path: Path) -> None:
    """A server that has seen the prompts of a trace has them cached."""
    file = written(tmp_path, entry(0, 600, hash_ids=[1]))
    [first], [second] = (list(read_trace(file, seed=seed, low_id=5, high_id=50)) for seed in (0, 1))
    assert first.prompt_ids[:512] != second.prompt_ids[:512]
    assert set(first.prompt_ids) == set(range(5, 50))


def test_times_and_lengths_are_the_lines(tmp_path: Path) -> None:
    arrivals = list(read_trace(written(tmp_path, entry(250, 3, 7), "", entry(250.5, 600, 1, hash_ids=[5, 6]))))
    assert [(each.at, len(each.prompt_ids), each.output_tokens) for each in arrivals] == [(0.25, 3, 7), (0.2505, 600, 1)]


def test_a_trace_is_read_as_far_as_it_is_asked_for(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, entry(0), "what is not read is not looked at"))
    assert next(trace).at == 0


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: is not a JSON object"),
        (entry(-1), "line 2: timestamp: must be a number of milliseconds"),
        (entry(0, prompt=0), "line 2: input_length: must be an integer from 1"),
        (entry(0, output=2**30), "line 2: output_length: must be an integer from 1"),
        (entry(0, hash_ids=["a"]), "line 2: hash_ids: must be a list of integers"),
        (entry(0, block_size=0), "line 2: block_size: must be an integer from 1"),
        (entry(0), "line 2: is earlier than the line before it"),
        ("x" * (2 << 20), "line 2: is longer than"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(tmp_path: Path, line: object, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        list(read_trace(written(tmp_path, entry(1), line)))
    assert named in str(refused.value)


def test_requests_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that nothing asked for yet takes no memory."""
    made: list[LoadRequest] = []

    def make(prompt_ids: tuple[int, ...], output_tokens: int) -> LoadRequest:
        made.append(LoadRequest(prompt_ids, output_tokens))
        return made[-1]

    monkeypatch.setattr(datasets, "LoadRequest", make)
    list(itertools.islice(drawn(10.0, 60.0, WorkloadShape(input_tokens=8, output_tokens=2)), 3))
    assert len(made) == 3


def test_a_load_draws_the_prompts_of_the_live_commands() -> None:
    """The shared beginning is the same for all of them, however many there are."""
    shape = WorkloadShape(input_tokens=20, output_tokens=4, spread=0.5, prefix_tokens=10)
    arrivals = list(drawn(100.0, 6.0, shape, seed=3))
    found = [LoadRequest(each.prompt_ids, each.output_tokens) for each in arrivals]
    assert found == make_requests(len(found), shape, seed=3)
    assert len({each.prompt_ids[:10] for each in arrivals}) == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "nothing.jsonl"))
