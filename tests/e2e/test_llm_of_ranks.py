"""Tests an `LLM` of several ranks: it answers as one of a single process does, also after Ctrl-C, and ends with any of its ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import until

from headrace import LLM, SamplingParams
from headrace.core.errors import EngineFatal, Unavailable

pytestmark = pytest.mark.process

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 400, "max_num_seqs": 8, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
PROMPTS = ("Hello!", "What is a KV cache?", "Sort these numbers: 5 3 9 1")


def answers(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate([*PROMPTS], GREEDY, use_tqdm=False)]


def member_processes() -> list[psutil.Process]:
    """Of this program: those that have ended are left out."""
    return [
        child for child in psutil.Process().children() if "--parent-fd" in child.cmdline() and "headrace-ranks-" in str(child.cmdline())
    ]


@pytest.fixture(scope="module")
def alone(trained_folder: Path) -> list[str]:
    with LLM(trained_folder, **OPTIONS) as llm:
        return answers(llm)


def during(llm: LLM, act: Any) -> threading.Thread:
    """Does it, from another thread, in the middle of what `llm` generates next."""

    def wait_and_act() -> None:
        until(lambda: llm.engine.snapshot().num_running)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_two_ranks_answer_as_one_process_does_also_after_ctrl_c_and_end_together(trained_folder: Path, alone: list[str]) -> None:
    with LLM(trained_folder, tensor_parallel_size=2, **OPTIONS) as llm:
        assert answers(llm) == alone
        interrupting = during(llm, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([*PROMPTS], LONG, use_tqdm=False)
        interrupting.join()
        assert answers(llm) == alone
        [member] = member_processes()
        ending = during(llm, member.kill)
        with pytest.raises(EngineFatal, match="rank 1"):
            llm.generate([*PROMPTS], LONG, use_tqdm=False)
        ending.join()
        assert not llm.is_open
        assert not member_processes()
        with pytest.raises(Unavailable):
            answers(llm)


def test_two_stages_answer_as_one_process_does(trained_folder: Path, alone: list[str]) -> None:
    with LLM(trained_folder, pipeline_parallel_size=2, **OPTIONS) as llm:
        assert answers(llm) == alone
        assert len(member_processes()) == 1
    assert not member_processes()
