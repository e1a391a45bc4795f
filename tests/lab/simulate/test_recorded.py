"""Tests traces made from request logs: which prompts begin alike is kept, and nothing else of them; and what is left out."""

from __future__ import annotations

import json
import random
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from headrace.core.errors import ConfigError
from headrace.core.hashing import MAX_RECORDED_BLOCKS, RECORDED_BLOCK_TOKENS, recorded_blocks
from headrace.lab.simulate import recorded
from headrace.lab.simulate.load import read_trace
from headrace.lab.simulate.recorded import RecordedTrace
from headrace.observe.request_log import MAX_LINE_BYTES, line_of

pytestmark = pytest.mark.pure

SIZE = RECORDED_BLOCK_TOKENS


def logged(time: float = 0.0, prompt_tokens: int = 20, completion_tokens: int = 5, **fields: Any) -> str:
    more = {"model": "m", "finish_reasons": ("stop",), **fields}
    return line_of(finished(time=1_795_000_000 + time, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, **more)) + "\n"


def recording(folder: Path, *lines: str, model: str | None = None) -> RecordedTrace:
    file = folder / "requests.jsonl"
    file.write_text("".join(lines))
    made = RecordedTrace(model)
    made.read(file)
    return made


def entries(made: RecordedTrace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in made.trace_lines()]


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Leading full blocks that two prompts share."""
    starts = range(0, min(len(one), len(other)) - SIZE + 1, SIZE)
    return len(list(takewhile(lambda begin: one[begin : begin + SIZE] == other[begin : begin + SIZE], starts)))


def test_replayed_prompts_share_what_the_recorded_ones_shared(tmp_path: Path) -> None:
    """Conversations that grow and branch, from the tokens through log and trace to the tokens of the replay."""
    draw = random.Random(4)
    prompts: list[tuple[int, ...]] = [()]
    for _ in range(60):
        kept = draw.choice(prompts)
        prompts.append(kept[: draw.randint(0, len(kept))] + tuple(draw.choices(range(50_000), k=draw.randint(1, 400))))
    lines = [logged(number, len(ids), prompt_blocks=recorded_blocks(b"key", ids)) for number, ids in enumerate(prompts[1:])]
    draw.shuffle(lines)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(recording(tmp_path, *lines).trace_lines()))
    replayed = [each.prompt_ids for each in read_trace(trace)]
    assert list(map(len, replayed)) == list(map(len, prompts[1:]))
    pairs = list(zip(combinations(prompts[1:], 2), combinations(replayed, 2), strict=True))
    assert all(num_shared(*before) == num_shared(*after) for before, after in pairs)
    assert max(num_shared(*after) for _, after in pairs) > 3


def test_a_trace_has_numbers_in_place_of_the_hashes(tmp_path: Path) -> None:
    ids = tuple(range(3 * SIZE))
    hashes = recorded_blocks(b"key", ids)
    assert recorded_blocks(b"other", ids)[:8] != hashes[:8], "another tenant, or another start of the server"
    made = entries(recording(tmp_path, logged(1, 400, prompt_blocks=hashes), logged(0.25, 300, prompt_blocks=hashes[:16])))
    assert made == [
        {"timestamp": 0, "input_length": 300, "output_length": 5, "hash_ids": [0, 1], "block_size": SIZE},
        {"timestamp": 750, "input_length": 400, "output_length": 5, "hash_ids": [0, 1, 2], "block_size": SIZE},
    ]


def test_the_longest_prompt_fits_a_line_of_the_log() -> None:
    """As much of it as is recorded; a longer line would lose its hashes."""
    ids = tuple(range(2 * MAX_RECORDED_BLOCKS * SIZE))
    hashes = recorded_blocks(b"key", ids)
    assert len(hashes) == MAX_RECORDED_BLOCKS * 8
    line = logged(prompt_blocks=hashes, request_id="f" * 24, client_request_id="f" * 64, tenant="t" * 200, user="u" * 200, seed=2**63)
    assert len(line) < MAX_LINE_BYTES


def test_a_log_without_hashes_is_a_trace_of_times_and_lengths(tmp_path: Path) -> None:
    assert entries(recording(tmp_path, logged(2), logged(5, 30, 7))) == [
        {"timestamp": 0, "input_length": 20, "output_length": 5},
        {"timestamp": 3000, "input_length": 30, "output_length": 7},
    ]


def test_each_sequence_of_a_request_is_one_of_the_trace(tmp_path: Path) -> None:
    made = entries(recording(tmp_path, logged(0, 20, 12, n=3, finish_reasons=("stop", "length", "stop"))))
    assert made == [{"timestamp": 0, "input_length": 20, "output_length": 4}] * 3


def test_what_cannot_be_replayed_is_left_out_and_counted(tmp_path: Path) -> None:
    made = recording(
        tmp_path,
        logged(),
        logged(completion_tokens=0),
        logged(finish_reasons=("stop", "stop")),
        logged(continued_id="abc"),
        logged(estimated_tokens=20),
        line_of(finished(model="m", status=429)) + "\n",
        line_of(finished(path="/v1/models")) + "\n",
    )
    assert (len(made.sequences), made.num_left_out) == (1, 5), "a path that generates nothing is no request of a model"


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    assert len(recording(tmp_path, logged(), logged()[:30]).sequences) == 1


def test_one_model_is_recorded_at_a_time(tmp_path: Path) -> None:
    both = (logged(), logged(model="other"), logged(1))
    assert len(recording(tmp_path, *both, model="m").sequences) == 2
    with pytest.raises(ConfigError, match=r"line 2: is of the model other, earlier ones are of m\. Give --model"):
        recording(tmp_path, *both)


@pytest.mark.parametrize(
    "line", ["text\n", "[]\n", "{}\n", '{"time": 5}\n', '{"time": "2026-11-23T02:08:42.658Z", "model": "m", "n": "x"}\n']
)
def test_what_is_no_request_log_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"requests\.jsonl, line 2: is no line of a request log in JSON"):
        recording(tmp_path, logged(), line)


def test_a_log_beyond_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_ENTRIES", 4)
    hashes = recorded_blocks(b"key", tuple(range(SIZE)))
    recording(tmp_path, *[logged(prompt_blocks=hashes)] * 2)
    with pytest.raises(ConfigError, match="line 3: is beyond 4 requests and blocks"):
        recording(tmp_path, *[logged(prompt_blocks=hashes)] * 3)
