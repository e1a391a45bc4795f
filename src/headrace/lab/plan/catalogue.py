"""Reads the planner's data: devices with links and prices, and shapes of models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.lab.plan.shapes import check_entry
from headrace.policy.placement.need import ASSUMED, COMPUTE_EFFICIENCY, LAYER_OVERHEAD_S, WEIGHT_EFFICIENCY, Device, Link

File = TypeVar("File")

FOLDER = Path(__file__).resolve().parent

MAX_FILE_BYTES = 1 << 20

ASSUMPTION = "assumption"
"""A price that is not from a provider's own list."""

OLD_MONTHS = 12

HOURS_PER_MONTH = 730

LIMITS = {
    "memory_gb": (1e-3, 1e6),
    "gb_per_s": (1e-3, 1e9),
    "latency_us": (1e-3, 1e6),
    "devices": (1, 65_536),
    "price_per_hour": (1e-6, 1e6),
    "layer_overhead_us": (1e-3, 1e6),
    "weight_efficiency": (1e-3, 1),
    "compute_efficiency": (1e-3, 1),
    "egress_per_gb": (0, 1e6),
    "storage_per_gb_month": (0, 1e6),
}
"""(least, most) of a value: narrow enough that every figure is finite."""

TFLOPS_LIMITS = (1e-3, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    gb_per_s: float
    latency_us: float
    devices: int
    source: str = ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    title: str
    memory_gb: float
    gb_per_s: float
    tflops: dict[str, float]
    link: str
    network: str
    price_per_hour: float | None = None
    price_source: str = ""
    as_of: str
    source: str
    is_served: bool = True
    layer_overhead_us: float | None = None
    weight_efficiency: float | None = None
    compute_efficiency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars per hour of one device, per GB sent to clients, per GB of weights and month."""

    gpu: dict[str, float] = field(default_factory=dict)
    egress_per_gb: float = 0.09
    storage_per_gb_month: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    devices: Mapping[str, Device]
    models: Mapping[str, Mapping[str, object]]
    prices: Prices

    def device(self, name: str) -> Device:
        """Raises ConfigError listing the known devices."""
        entry = self.devices.get(name) or self.devices.get(name.lower().replace("_", "-"))
        if entry is None:
            raise ConfigError("--gpu", f"{name!r} is not in the catalogue", f"Known: {', '.join(sorted(self.devices))}.")
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceFile:
    links: dict[str, LinkEntry] = field(default_factory=dict)
    devices: dict[str, DeviceEntry] = field(default_factory=dict)


def read_catalogue(own: Path | None = None, prices: Path | None = None) -> Catalogue:
    """Raises ConfigError."""
    bundled = FOLDER / "devices.toml"
    links, devices, _ = _entries(bundled)
    files = dict.fromkeys(devices, bundled)
    models: dict[str, Mapping[str, object]] = dict(_read_toml(FOLDER / "models.toml"))
    if own is not None:
        more_links, more_devices, more_models = _entries(own)
        files |= dict.fromkeys(more_devices, own)
        links, devices, models = links | more_links, devices | more_devices, models | more_models
    made = {name: _device(name, entry, links, f"{files[name]}: devices.{name}") for name, entry in devices.items()}
    asked = Prices() if prices is None else _prices(prices)
    for name, price in asked.gpu.items():
        if name not in made:
            is_misplaced = name in {item.name for item in fields(Prices)}
            remedy = "Write it above [gpu]." if is_misplaced else f"Known: {', '.join(sorted(made))}."
            raise ConfigError(f"{prices}: gpu.{name}", "is not in the catalogue", remedy)
        made[name] = replace(made[name], price_per_hour=price, price_source=f"{prices}", as_of="")
    return Catalogue(devices=made, models=models, prices=asked)


def is_old(as_of: str, today: str) -> bool:
    """Dates are yyyy-mm; without one an entry is the user's own and never old."""
    return bool(as_of) and _months(today) - _months(as_of) > OLD_MONTHS


def _months(date: str) -> int:
    return 12 * int(date[:4]) + int(date[5:7])


def _entries(path: Path) -> tuple[dict[str, LinkEntry], dict[str, DeviceEntry], dict[str, Any]]:
    data = _read_toml(path)
    models = data.pop("models", {})
    if not isinstance(models, dict) or not all(isinstance(model, dict) for model in models.values()):
        raise ConfigError(f"{path}: models", "must hold tables, one per model", "Write [models.NAME] and the fields of its config.json.")
    decoded = _decoded(_DeviceFile, data, path)
    for name, link in decoded.links.items():
        _check_limits(f"{path}: links.{name}.", link)
    for name, model in models.items():
        check_entry(f"{path}: models.{name}", name, model)
    return decoded.links, decoded.devices, models


def _device(name: str, entry: DeviceEntry, links: Mapping[str, LinkEntry], where: str) -> Device:
    _check_limits(f"{where}.", entry)
    if "bf16" not in entry.tflops:
        raise ConfigError(f"{where}.tflops", "lacks bf16", "Give the dense FLOP/s of bf16 or fp16 products.")
    for dtype, rate in entry.tflops.items():
        _check_limit(f"{where}.tflops.{dtype}", rate, TFLOPS_LIMITS)
    if not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry.as_of):
        raise ConfigError(f"{where}.as_of", f"{entry.as_of!r} is no month", "Write it as 2026-11.")
    _check_price_source(entry, where)
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
        price_source=_price_source(entry),
        as_of=entry.as_of,
        source=entry.source,
        is_served=entry.is_served,
        layer_overhead_s=LAYER_OVERHEAD_S if entry.layer_overhead_us is None else entry.layer_overhead_us * 1e-6,
        weight_efficiency=WEIGHT_EFFICIENCY if own_weight is None else dict.fromkeys(WEIGHT_EFFICIENCY, own_weight),
        compute_efficiency=COMPUTE_EFFICIENCY if own_compute is None else dict.fromkeys(COMPUTE_EFFICIENCY, own_compute),
    )


def _check_price_source(entry: DeviceEntry, where: str) -> None:
    remedy = f'Write "PROVIDER, LIST", which was true in the month of as_of, or "{ASSUMPTION}".'
    if entry.price_per_hour is None:
        if entry.price_source:
            raise ConfigError(f"{where}.price_source", "has no price_per_hour beside it", "Give both, or neither.")
    elif not entry.price_source:
        raise ConfigError(f"{where}.price_source", "is missing beside price_per_hour", remedy)
    elif entry.price_source != ASSUMPTION and not re.fullmatch(r"\s*\S[^,]*,.*\S.*", entry.price_source):
        raise ConfigError(f"{where}.price_source", f"{entry.price_source!r} names no provider and list", remedy)


def _price_source(entry: DeviceEntry) -> str:
    return f"{entry.price_source}, {entry.as_of}" if entry.price_source not in ("", ASSUMPTION) else entry.price_source


def _link(name: str, links: Mapping[str, LinkEntry], where: str) -> Link:
    entry = links.get(name)
    if entry is None:
        raise ConfigError(where, f"{name!r} is no link", f"Known: {', '.join(sorted(links))}.")
    return Link(name, entry.gb_per_s * 1e9, entry.latency_us * 1e-6, entry.devices, entry.source)


def _prices(path: Path) -> Prices:
    prices = _decoded(Prices, _read_toml(path), path)
    for name, price in prices.gpu.items():
        _check_limit(f"{path}: gpu.{name}", price, LIMITS["price_per_hour"])
    _check_limits(f"{path}: ", prices)
    return prices


def _decoded(kind: type[File], data: dict[str, Any], path: Path) -> File:
    try:
        return decode(kind, data)
    except ConfigError as error:
        raise error.at(f"{path}: {error.where}") from None
    except OverflowError:
        raise ConfigError(str(path), "holds an integer that is too large for a number with a point") from None


def _check_limits(where: str, entry: DeviceEntry | LinkEntry | Prices) -> None:
    for item in fields(entry):
        value = getattr(entry, item.name)
        if item.name in LIMITS and value is not None:
            _check_limit(f"{where}{item.name}", value, LIMITS[item.name])


def _check_limit(where: str, value: float, limits: tuple[float, float]) -> None:
    low, high = limits
    if not low <= value <= high:
        raise ConfigError(where, f"must be a number from {low:g} to {high:g}, got {value:g}")


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
