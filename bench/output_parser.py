"""Measures the CPU time of parsing generated text in pieces of a token: `headrace.text.output.parser`, and transformers' ResponseParser
beside it.

    python -m bench.output_parser -> bench/results/output-parser.json

Each text is parsed at growing sizes, so that time which grows faster than the text is seen. The growth stops where a parse takes MAX_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from headrace.lab.environment import environment
from headrace.lab.report import write_json
from headrace.text.output.formats import REASONING_FORMATS, TOOL_FORMATS
from headrace.text.output.parser import OutputParser

RESULT = Path(__file__).resolve().parent / "results" / "output-parser.json"
PIECE_CHARS = 4
SIZES = (62_500, 250_000, 1_000_000)
MAX_S = 60.0
"""CPU seconds of one parse. After a longer one the text is not parsed at a larger size."""

TEXTS: dict[str, Callable[[int], str]] = {
    "prose": lambda size: ("the quick brown fox " * (size // 20 + 1))[:size],
    "reasoning": lambda size: "<think>" + ("hm, or so " * (size // 10 + 1))[:size],
    "one call": lambda size: '<tool_call>{"name": "f", "arguments": {"x": "' + "y" * size + '"}}</tool_call>',
}

RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    },
}


def parse_ours(pieces: list[str]) -> None:
    parser = OutputParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    for piece in pieces:
        parser.push(piece)
    parser.finish()


def parse_theirs(pieces: list[str]) -> None:
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(RESPONSE_TEMPLATE, prefix="")
    for piece in pieces:
        parser.feed(piece)
    parser.finalize()


def measure(parse: Callable[[list[str]], None]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, text_of in TEXTS.items():
        for size in SIZES:
            text = text_of(size)
            pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
            started = time.process_time()
            parse(pieces)
            took_s = time.process_time() - started
            rows.append({"text": name, "chars": size, "cpu_s": round(took_s, 3), "us_per_piece": round(took_s / len(pieces) * 1e6, 2)})
            print(parse.__name__, rows[-1], flush=True)
            if took_s > MAX_S:
                break
    return rows


def main() -> None:
    parse_theirs(["warm"])
    write_json(RESULT, {"environment": environment(), "ours": measure(parse_ours), "transformers": measure(parse_theirs)})


if __name__ == "__main__":
    main()
