"""Serves the worker's end of the comparison: JSON lines in on stdin, out on what was stdout. Standard library only; runs in a peer's
Python.

{"prompts": [[ids]], "max_tokens": [n]}  ->  {"seconds": s, "tokens": n}   or   {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Generate = Callable[["list[list[int]]", "list[int]"], int]
"""Generates greedily, end tokens ignored; returns the number of tokens made."""


def nothing(generate: Any, prompts: list[list[int]], max_tokens: list[int]) -> None:
    """What an engine does before the clock starts."""


def serve(load: Callable[[dict[str, Any]], Generate], prepare: Callable[[Any, list[list[int]], list[int]], None] = nothing) -> None:
    """Load with the settings of argv[1], then answer until stdin closes. Libraries may print: stdout is theirs, the answers' is a copy.

    prepare  called with what `load` gave and the question, before the clock starts
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load(json.loads(sys.argv[1]))
    for line in sys.stdin:
        question = json.loads(line)
        try:
            prepare(generate, question["prompts"], question["max_tokens"])
            began = time.perf_counter()
            tokens = generate(question["prompts"], question["max_tokens"])
            answer: dict[str, object] = {"seconds": time.perf_counter() - began, "tokens": tokens}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
