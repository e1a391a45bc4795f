"""Tests an `LLM` of several ranks: it answers as one of a single process does, with adapters and also after Ctrl-C, and ends with any of
its ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import until

from headrace import LLM, LoRARequest, SamplingParams
from headrace.core.errors import EngineFatal, Unavailable

pytestmark = pytest.mark.process

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 400, "max_num_seqs": 8, "num_threads": 1, "enable_lora": True,
    "max_loras": 1,
}  # fmt: skip
ADAPTERS = (None, LoRARequest("pirate", 1, "pirate"), LoRARequest("hardware-shop", 2, "hardware-shop"))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
PROMPTS = ("Hello!", "What is a KV cache?", "Sort these numbers: 5 3 9 1")


def answers(llm: LLM) -> list[str]:
    """Of the base model and of two adapters, which take turns in one place."""
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in ADAPTERS]
    outputs = llm.generate([prompt for prompt, _ in asked], GREEDY, lora_request=[adapter for _, adapter in asked], use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def member_processes() -> list[psutil.Process]:
    """Of this program: those that have ended are left out."""
    return [
        child for child in psutil.Process().children() if "--parent-fd" in child.cmdline() and "headrace-ranks-" in str(child.cmdline())
    ]


@pytest.fixture(scope="module")
def alone(trained_folder: Path) -> list[str]:
    with LLM(trained_folder, **OPTIONS) as llm:
        found = answers(llm)
        assert len(set(found)) == len(found)
        return found


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
