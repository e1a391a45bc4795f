"""Combines the metric families of several gateway workers into one page.

What all workers read alike from engines is not included: the worker that is asked adds it once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

WORKER = "worker"


def encode_families(families: Iterable[Metric]) -> bytes:
    """JSON: per family name, text, type, unit and samples."""
    found = [
        [family.name, family.documentation, family.type, family.unit, [[name, labels, value] for name, labels, value, *_ in family.samples]]
        for family in families
    ]
    return json.dumps(found, separators=(",", ":")).encode()


def merge_workers(by_worker: Mapping[int, bytes]) -> list[Metric]:
    """Bytes that `encode_families` did not make count as no answer."""
    is_up = GaugeMetricFamily("headrace_gateway_worker_up", "1 for each gateway worker whose series are on this page.", labels=(WORKER,))
    merged: dict[str, Metric] = {is_up.name: is_up}
    for worker, data in sorted(by_worker.items()):
        families = _decoded(data)
        is_up.add_metric((str(worker),), float(families is not None))
        for family in families or ():
            one = merged.setdefault(family.name, _family(family.name, family.documentation, family.type, family.unit, ()))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, WORKER: str(worker)}, sample.value)
    return list(merged.values())


def _decoded(data: bytes) -> list[Metric] | None:
    try:
        return [_family(*family) for family in json.loads(data)]
    except (ValueError, TypeError, RecursionError):
        return None


def _family(name: str, documentation: str, kind: str, unit: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> Metric:
    family = Metric(name, documentation, kind, unit)
    for sample_name, labels, value in samples:
        family.add_sample(sample_name, labels, float(value))
    return family
