"""Parses random outputs in random pieces: every split gives the parse of the whole, nothing raises, and text without calls comes back
whole.

    PYTHONPATH=src:tests/support nice -n 19 .venv/bin/python tests/text/output/fuzz.py --cpu-s 600 --output-json FILE

Writes the number of texts and of their splits, and the CPU seconds they took. The suite runs the same check on fewer texts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from output_texts import check_case, random_case

NUM_SPLITS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-s", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    started, num_texts, num_chars = time.process_time(), 0, 0
    while time.process_time() - started < given.cpu_s:
        case = random_case(rng, max_parts=rng.choice([10, 30, 100]))
        check_case(case, rng, NUM_SPLITS)
        num_texts += 1
        num_chars += len(case.text)
    result = {"seed": given.seed, "cpu_s": round(time.process_time() - started), "num_texts": num_texts, "num_chars": num_chars}
    result |= {"splits_of_each": NUM_SPLITS + 1, "failures": 0}
    print(json.dumps(result))
    if given.output_json:
        given.output_json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
