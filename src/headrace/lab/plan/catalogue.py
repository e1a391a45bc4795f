"""The planner's data: devices with links and prices, and shapes of models: TOML in this package, and a file of the user's beside it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.policy.placement.device import COMPUTE_EFFICIENCY, LAYER_OVERHEAD_S, WEIGHT_EFFICIENCY, Device, Link

FOLDER = Path(__file__).resolve().parent

MAX_FILE_BYTES = 1 << 20
"""Most bytes of a catalogue or of a file of prices."""

OLD_MONTHS = 12
"""Months after which an entry is said to be old."""

HOURS_PER_MONTH = 730


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    gb_per_s: float
    latency_us: float
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """The keys of a device; devices.toml says what they mean."""

    title: str
    memory_gb: float
    gb_per_s: float
    tflops: dict[str, float]
    link: str
    network: str
    price_per_hour: float | None = None
    as_of: str
    source: str
    is_served: bool = True
    layer_overhead_us: float | None = None
    weight_efficiency: float | None = None
    compute_efficiency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars. gpu: per hour of one device, by name; egress per GB sent to clients; storage per GB of weights and month"""

    gpu: dict[str, float] = field(default_factory=dict)
    egress_per_gb: float = 0.09
    storage_per_gb_month: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    devices: Mapping[str, Device]
    models: Mapping[str, Mapping[str, object]]
    prices: Prices

    def device(self, name: str) -> Device:
        """Raises ConfigError naming the devices that there are."""
        found = self.devices.get(name) or self.devices.get(name.lower().replace("_", "-"))
        if found is None:
            raise ConfigError("--gpu", f"{name!r} is not in the catalogue", f"Known: {', '.join(sorted(self.devices))}.")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceFile:
    links: dict[str, LinkEntry] = field(default_factory=dict)
    devices: dict[str, DeviceEntry] = field(default_factory=dict)


def read_catalogue(own: Path | None = None, prices: Path | None = None) -> Catalogue:
    """The package's catalogue with the entries of the user's files. Raises ConfigError naming file, entry and key."""
    links, devices, _ = _entries(FOLDER / "devices.toml")
    models: dict[str, Mapping[str, object]] = dict(_read_toml(FOLDER / "models.toml"))
    if own is not None:
        more_links, more_devices, more_models = _entries(own)
        links, devices, models = links | more_links, devices | more_devices, models | more_models
    made = {name: _device(name, entry, links) for name, entry in devices.items()}
    asked = Prices() if prices is None else _prices(prices)
    for name, price in asked.gpu.items():
        if name not in made:
            raise ConfigError(f"{prices}: gpu.{name}", "is not in the catalogue", f"Known: {', '.join(sorted(made))}.")
        made[name] = replace(made[name], price_per_hour=price, as_of="", source=f"{prices}")
    return Catalogue(devices=made, models=models, prices=asked)


def is_old(as_of: str, today: str) -> bool:
    """Whether an entry is older than OLD_MONTHS. Both are yyyy-mm; an entry without a date is the user's own, and not old."""
    return bool(as_of) and _months(today) - _months(as_of) > OLD_MONTHS


def _months(date: str) -> int:
    return 12 * int(date[:4]) + int(date[5:7])


def _entries(path: Path) -> tuple[dict[str, LinkEntry], dict[str, DeviceEntry], dict[str, Any]]:
    data = _read_toml(path)
    models = data.pop("models", {})
    if not isinstance(models, dict) or not all(isinstance(model, dict) for model in models.values()):
        raise ConfigError(f"{path}: models", "must hold tables, one per model", "Write [models.NAME] and the fields of its config.json.")
    try:
        found = decode(_DeviceFile, data)
    except ConfigError as error:
        raise error.at(f"{path}: {error.where}") from None
    return found.links, found.devices, models


def _device(name: str, entry: DeviceEntry, links: Mapping[str, LinkEntry]) -> Device:
    where = f"devices.{name}"
    _check_positive(where, entry)
    if "bf16" not in entry.tflops:
        raise ConfigError(f"{where}.tflops", "lacks bf16", "Give the dense FLOP/s of bf16 or fp16 products.")
    for dtype, rate in entry.tflops.items():
        _check_number(f"{where}.tflops.{dtype}", rate)
    if not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry.as_of):
        raise ConfigError(f"{where}.as_of", f"{entry.as_of!r} is no month", "Write it as 2026-11.")
    own_weight, own_compute = entry.weight_efficiency, entry.compute_efficiency
    return Device(
        name=name,
        title=entry.title,
        memory_bytes=entry.memory_gb * 1e9,
        bytes_per_s=entry.gb_per_s * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in entry.tflops.items()},
        link=_link(entry.link, links, f"{where}.link"),
        network=_link(entry.network, links, f"{where}.network"),
        price_per_hour=entry.price_per_hour,
        as_of=entry.as_of,
        source=entry.source,
        is_served=entry.is_served,
        layer_overhead_s=LAYER_OVERHEAD_S if entry.layer_overhead_us is None else entry.layer_overhead_us * 1e-6,
        weight_efficiency=WEIGHT_EFFICIENCY if own_weight is None else dict.fromkeys(WEIGHT_EFFICIENCY, own_weight),
        compute_efficiency=COMPUTE_EFFICIENCY if own_compute is None else dict.fromkeys(COMPUTE_EFFICIENCY, own_compute),
    )


def _link(name: str, links: Mapping[str, LinkEntry], where: str) -> Link:
    entry = links.get(name)
    if entry is None:
        raise ConfigError(where, f"{name!r} is no link", f"Known: {', '.join(sorted(links))}.")
    _check_positive(f"links.{name}", entry)
    return Link(name, entry.gb_per_s * 1e9, entry.latency_us * 1e-6, entry.devices)


def _prices(path: Path) -> Prices:
    try:
        found = decode(Prices, _read_toml(path))
    except ConfigError as error:
        raise error.at(f"{path}: {error.where}") from None
    for name, price in found.gpu.items():
        _check_number(f"{path}: gpu.{name}", price)
    for name in ("egress_per_gb", "storage_per_gb_month"):
        if not 0 <= (price := getattr(found, name)) < math.inf:
            raise ConfigError(f"{path}: {name}", f"must be a number of dollars, 0 or more, got {price}")
    return found


def _check_positive(where: str, entry: DeviceEntry | LinkEntry) -> None:
    for item in fields(entry):
        value = getattr(entry, item.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(f"{where}.{item.name}", value)
        if item.name.endswith("_efficiency") and value is not None and value > 1:
            raise ConfigError(f"{where}.{item.name}", f"must be a share up to 1, got {value}")


def _check_number(where: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(where, f"must be a number above 0, got {value}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(str(path), f"is longer than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(text.decode("utf-8"))
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(str(path), f"is not TOML: {error}") from None
