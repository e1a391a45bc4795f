"""Keeps what the autoscaler has learned of each model over a restart, and what its replicas have taken of the day, in one file of the state
folder. A file that cannot be read counts as none: it is learned again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

from headrace.core.regular_files import read_file
from headrace.machine.private_files import write_private_file
from headrace.policy.scaling.autoscaler import ScalingRules
from headrace.policy.scaling.budget import DayUse
from headrace.policy.scaling.history import ArrivalHistory

log = logging.getLogger(__name__)

MAX_KEPT_MODELS = 100
"""1,152 numbers each."""
MAX_KEPT_BYTES = MAX_KEPT_MODELS << 15


@dataclass(frozen=True, slots=True)
class KeptScaling:
    """use: None: not known"""

    load_s: float = ScalingRules().load_s
    history: ArrivalHistory = field(default_factory=ArrivalHistory)
    use: DayUse | None = None


def read_scaling(file: Path | None) -> dict[str, KeptScaling]:
    if file is None or not file.exists():
        return {}
    try:
        data = json.loads(read_file(file, MAX_KEPT_BYTES))
        return {str(name): _kept(model) for name, model in data["models"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be read, the load of earlier days is not known, and the hours of this one begin anew: %r", file, error)
        return {}


def _kept(model: Mapping[str, object]) -> KeptScaling:
    load_s = float(str(model["load_s"]))
    if not 0.0 < load_s < math.inf:
        raise ValueError("load_s")
    use = DayUse.of(model["use"]) if model.get("use") is not None else None
    return KeptScaling(load_s, ArrivalHistory.of(model["days"], model["weeks"]), use)


def keep_scaling(file: Path | None, models: Mapping[str, KeptScaling]) -> None:
    """At most MAX_KEPT_MODELS. A file that cannot be written is logged."""
    if file is None:
        return
    kept = {
        name: {
            "load_s": round(model.load_s, 3),
            "days": model.history.days,
            "weeks": model.history.weeks,
            "use": None if model.use is None else astuple(model.use),
        }
        for name, model in [*models.items()][:MAX_KEPT_MODELS]
    }
    try:
        write_private_file(file, json.dumps({"models": kept}).encode())
    except OSError as error:
        log.error("%s cannot be written, the load of earlier days is lost at a restart: %s", file, error.strerror)
