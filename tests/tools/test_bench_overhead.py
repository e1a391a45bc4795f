"""Tests host overhead and quality: what they count, on things small enough to know the answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from bench.host_overhead import busiest, thread_seconds
from bench.quality import PRECISIONS, exact_matches
from headrace import LLM, SamplingParams

pytestmark = pytest.mark.pure

PROMPT = [5, 6, 7]


def test_threads_of_one_role_and_name_are_one_and_a_process_has_its_role_from_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system would count is made up; the thread's name is that of this thread."""
    own = threading.get_native_id()
    name = Path(f"/proc/self/task/{own}/comm").read_text().strip()

    def process(command: str, *seconds: tuple[float, float], children: tuple[object, ...] = ()) -> Any:
        threads = [SimpleNamespace(id=own, user_time=user, system_time=system) for user, system in seconds]
        return SimpleNamespace(
            pid=os.getpid(), cmdline=command.split, threads=lambda: threads, children=lambda recursive: children if recursive else ()
        )

    engine, gateway = process("headrace engine --x", (0.5, 0.0)), process("headrace gateway", (1.0, 0.5), (0.25, 0.25))
    monkeypatch.setattr(psutil, "Process", lambda pid: process("headrace serve", (8.0, 0.0), children=(engine, gateway)))
    assert thread_seconds(1) == {f"supervisor {name}": 8.0, f"engine {name}": 0.5, f"gateway {name}": 2.0}


def test_the_busiest_thread_comes_first_and_absence_counts_as_idle() -> None:
    found = busiest([{"a": 0.2, "b": 0.5, "c": 0.0}, {"a": 0.4}], most=2)
    assert [name for name, _ in found] == ["a", "b"]
    assert dict(found) == pytest.approx({"a": 0.3, "b": 0.25})


def test_an_answer_is_exact_only_token_by_token() -> None:
    """What the model says is learned first, then compared: whole, with its last token changed, and with one more."""
    with LLM(**PRECISIONS["float32"]) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, max_tokens=6)
        said = list(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)
        assert exact_matches(llm, [PROMPT], [said]) == [True]
        assert exact_matches(llm, [PROMPT], [[*said[:-1], said[-1] + 1]]) == [False]
        assert exact_matches(llm, [PROMPT], [said[:-1] + [said[-1]] * 2]) == [False]
