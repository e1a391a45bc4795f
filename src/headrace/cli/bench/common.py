"""Flags, the shape of the data set, the conditions of a run, and the JSON written: what the `headrace bench` commands share."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exits import UsageRefused

if TYPE_CHECKING:
    from headrace.lab.datasets import LoadRequest, WorkloadShape
    from headrace.lab.loadgen import LoadTarget
    from headrace.lab.metrics import LoadRecord

Flag = typer.Option


def writable(file: Path | None) -> Path | None:
    """Checked before the run, because a run takes long. Raises BadParameter."""
    if file is None:
        return None
    folder = file.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}")
    if file.is_dir() or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{file} is a folder" if file.is_dir() else f"nothing can be written in {folder}")
    return file


Output = Annotated[
    Path | None,
    Flag("--output-json", "--result-filename", callback=writable, help="File for all that was measured, raw records included."),
]
Url = Annotated[str, Flag("--url", "--base-url", help="Root of the server, with or without /v1.")]
ServedModel = Annotated[str | None, Flag("--model", help="Served name; default: the first one listed.")]
AsJson = Annotated[bool, Flag("--json", help="Print JSON instead of a table.")]
Seed = Annotated[int, Flag("--seed", help="Seed of the prompts and the arrival times.")]
Bandwidth = Annotated[bool, Flag("--bandwidth/--no-bandwidth", help="Measure read bandwidth too (needs a checkout).")]


class RunConditions:
    """The environment before a run, and read bandwidth and load average before and after it."""

    def __init__(self, with_bandwidth: bool, device: str = "cpu") -> None:
        from headrace.lab.environment import BandwidthUnknown, ReadBandwidth, bandwidth_script, environment, read_bandwidth

        self.before = environment()
        self.measured: ReadBandwidth | None = None
        self.no_bandwidth = "" if with_bandwidth else "not asked for (--no-bandwidth)"
        if device != "cpu":
            self.no_bandwidth = f"it is measured for the CPU's memory alone, the engine ran on {device}"
        elif with_bandwidth:
            try:
                self.measured = read_bandwidth(bandwidth_script())
            except BandwidthUnknown as error:
                self.no_bandwidth = f"the read bandwidth could not be measured: {error}"

    @property
    def bandwidth(self) -> float | None:
        return self.measured.bytes_per_s if self.measured else None

    def result(self, **parts: object) -> dict[str, object]:
        from headrace.lab.environment import bandwidth_script, environment, measure_bandwidth

        after = measure_bandwidth(bandwidth_script()) if self.measured else None
        note = {"no_read_bandwidth": self.no_bandwidth} if self.no_bandwidth else {}
        return {
            "environment": self.before,
            "load_average_after": environment().load_average,
            "read_bandwidth_bytes_per_s": [self.bandwidth, after.bytes_per_s if after else None],
            "read_bandwidth_pattern": [bandwidth.pattern if bandwidth else None for bandwidth in (self.measured, after)],
            **note,
            **parts,
        }


def make_shape(dataset: str, inputs: int, outputs: int, spread: float, prefix: int, num_prefixes: int, high_id: int) -> WorkloadShape:
    """The checked shape of a data set named as vLLM names it. Raises ValueError."""
    from headrace.lab.datasets import WorkloadShape

    if dataset not in ("random", "shared-prefix"):
        raise ValueError(f"--dataset-name {dataset}: is not one of random, shared-prefix")
    if dataset == "shared-prefix" and not prefix:
        prefix = inputs // 2
    return WorkloadShape(
        input_tokens=inputs,
        output_tokens=outputs,
        spread=spread,
        prefix_tokens=prefix,
        num_prefixes=num_prefixes,
        low_id=min(300, high_id // 2),
        high_id=high_id,
    ).checked()


def warm_up(shape: WorkloadShape) -> list[LoadRequest]:
    """Prompts of another seed, so that compiling and first touches are not measured. A negative seed is its absolute value."""
    from headrace.lab.datasets import make_requests

    return make_requests(4, replace(shape, output_tokens=min(shape.output_tokens, 4), spread=0.0), seed=1 << 62)


def find_target(url: str, model: str | None, api_key: str | None) -> LoadTarget:
    """Raises ServerFailed."""
    from headrace.cli.chat.client import ApiClient
    from headrace.lab.loadgen import LoadTarget

    client = ApiClient(url, api_key=api_key)
    return LoadTarget(url=client.url, model=model or (client.models() or [""])[0], api_key=api_key)


def refuse_beside_trace(context: typer.Context, names: Collection[str], remedy: str) -> None:
    """names: parameters that a trace replaces. Raises UsageRefused for one that was given."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageRefused(f"{param.opts[-1]}: a trace has its own times and lengths; {remedy}.")


def write_result(file: Path | None, result: Mapping[str, object], records: Sequence[LoadRecord]) -> None:
    from headrace.lab.report import write_json

    if file is not None:
        write_json(file, {**result, "records": records})
