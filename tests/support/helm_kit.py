"""Renders the shipped chart as `helm template` would, by Helm's own library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import helm_python
import yaml

from tests.house.reader import ROOT

CHART = ROOT / "deploy" / "helm" / "headrace"
EXAMPLES = ROOT / "deploy" / "helm" / "examples"
RELEASE, NAMESPACE = "demo", "llm"

Object = dict[str, Any]


def example(name: str) -> Object:
    """Values of an example; "" are the chart's own."""
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")) if name else {}


def rendered(values: Mapping[str, Any], release: str = RELEASE) -> dict[str, Object]:
    """Kind -> object; those of the engines' pods are "KIND engines". Raises helm_python.HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name=release, namespace=NAMESPACE)
    objects = [made for path, text in files.items() if path.endswith(".yaml") for made in yaml.safe_load_all(text) if made is not None]
    by_kind = {f"{made['kind']} {made['metadata']['name'].removeprefix(release).lstrip('-')}".strip(): made for made in objects}
    assert len(by_kind) == len(objects)
    return by_kind


def pod_of(objects: Mapping[str, Object], kind: str = "Deployment", template: str = "template") -> Object:
    """template: of a LeaderWorkerSet leaderTemplate or workerTemplate"""
    spec: Object = objects[kind]["spec"]
    pod: Object = spec.get("leaderWorkerTemplate", spec)[template]["spec"]
    return pod


def started_with(pod: Object, variables: Mapping[str, str]) -> list[str]:
    """Arguments of its container, whose variables the kubelet has filled in."""
    arguments: list[str] = pod["containers"][0]["args"]
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], argument) for argument in arguments]


def merged(values: Mapping[str, Any]) -> Object:
    """The values of a release, the chart's defaults among them."""
    with helm_python.Chart.load(CHART) as chart:
        return dict(chart.merge_values(dict(values)))
