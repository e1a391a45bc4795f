"""`headrace bench serve|throughput|latency|steps` measures servers and engines, with the names and formulas of vLLM's tools.

Every JSON result has the commit, the machine, the load average, and the read bandwidth before and after the run. `lab.metrics` and
`lab.offline` compute the figures.
"""

from __future__ import annotations

import typer

from headrace.cli.bench_offline import latency, steps, throughput
from headrace.cli.bench_serve import serve

bench_app = typer.Typer(help="Measure a server, or the engine in this process.", no_args_is_help=True, rich_markup_mode=None)
bench_app.command()(serve)
bench_app.command()(throughput)
bench_app.command()(latency)
bench_app.command()(steps)
