"""Measures and simulates the tables of docs/benchmarks.md: `make bench`, or `make bench ARGS="--only prefix-cache --rounds 20"`.

Needs a quiet machine and a few minutes. Writes bench/results/TABLE-TIME.json, then the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from bench import chunked_prefill, continuous_batching, one_at_a_time, paged_memory, prefix_cache, static_batching
from bench.engine_options import add_engine_options, engine_config
from bench.harness import Table, run_table
from bench.report import newest_results, write_page
from bench.tinyllama import write_tinyllama
from headrace.bundled import DEFAULT_MODEL
from headrace.engine.config import EngineConfig

TABLES: dict[str, Callable[[EngineConfig], Table]] = {
    "continuous-batching": continuous_batching.table,
    "continuous-batching-skewed": continuous_batching.skewed_table,
    "continuous-batching-equal-latency": continuous_batching.equal_latency_table,
    "continuous-batching-alone": continuous_batching.alone_table,
    "one-at-a-time-32": one_at_a_time.table,
    "one-at-a-time-64": partial(one_at_a_time.table, num_requests=64),
    "paged-memory": paged_memory.table,
    "chunked-prefill": chunked_prefill.table,
    "prefix-cache": prefix_cache.table,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, action="append", help="again for more; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or bundled model")
    add_engine_options(parser, "dtype", "load_format", "kernels", "num_threads")
    parser.add_argument("--no-page", action="store_true", help="leave docs/benchmarks.md as it is")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    base = engine_config(given.model, given)
    write_tinyllama(one_at_a_time.MODEL)
    for name in given.only or TABLES:
        print(f"-> {run_table(TABLES[name](base), rounds=given.rounds)}")
    if not given.only:
        static_batching.run()
    if not given.no_page:
        write_page(newest_results())


if __name__ == "__main__":
    main()
