"""Makes links between network namespaces of this machine: the kernel drops, delays or loses packets of its own TCP. Needs root.

    this namespace -- 10.251.0.0/30 -- gateway's namespace -- 10.251.N.0/30 -- namespace of engine N

A direction is cut by a blackhole route at its sender, so that acknowledgements are lost with the data, as on a real link that is cut. Delay
and loss are `tc netem`'s, where the kernel has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from bench.network_faults import HEALTHY, Direction, LinkFault
from bench.storms.by_hand import Place


@dataclass(frozen=True, slots=True)
class Outlet:
    """The sender of one direction: its namespace, its device, and the address at the other end."""

    namespace: str
    device: str
    to: str


@dataclass
class NamespaceLink:
    """One link. It has what the faults of a `FaultyLink` have that packets can have: no reset, no refusal and no rate."""

    outlets: dict[Direction, Outlet]
    faults: dict[Direction, LinkFault] = field(default_factory=lambda: dict.fromkeys(Direction, HEALTHY))

    def set(self, fault: LinkFault, *directions: Direction) -> None:
        """Raises ValueError for what a namespace's link cannot do, subprocess.CalledProcessError where the kernel refuses."""
        if fault.bytes_per_s is not None:
            raise ValueError("bytes_per_s: not on a link between namespaces")
        for direction in directions or Direction:
            outlet, before = self.outlets[direction], self.faults[direction]
            if fault.is_cut != before.is_cut:
                ip("-n", outlet.namespace, "route", "add" if fault.is_cut else "del", "blackhole", f"{outlet.to}/32")
            if is_late(before):
                tc(outlet, "del")
            if is_late(fault):
                delay = ["delay", f"{fault.delay_s * 1000:g}ms", f"{fault.jitter_s * 1000:g}ms"]
                tc(outlet, "add", "netem", *delay, "loss", f"{fault.loss:.2%}")
            self.faults[direction] = fault


@dataclass(frozen=True, slots=True)
class Namespaces:
    """gateway: its place. engines: theirs by name, and the links to them"""

    gateway: Place
    engines: dict[str, Place]
    links: dict[str, NamespaceLink]


def is_late(fault: LinkFault) -> bool:
    return bool(fault.delay_s or fault.jitter_s or fault.loss)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def tc(outlet: Outlet, verb: str, *words: str) -> None:
    command = ["tc", "qdisc", verb, "dev", outlet.device, "root", *words]
    subprocess.run(["ip", "netns", "exec", outlet.namespace, *command], check=True, capture_output=True)


def why_not_usable() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"hr{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace can be made: {error}"
    return ""


def has_netem() -> bool:
    """Whether the kernel has `tc netem`, asked in a namespace of its own."""
    with ExitStack() as stack:
        name = namespace(stack, "netem")
        try:
            tc(Outlet(name, "lo", ""), "add", "netem", "delay", "1ms")
        except subprocess.CalledProcessError:
            return False
        return True


def namespace(stack: ExitStack, suffix: str) -> str:
    name = f"hr{os.getpid()}-{suffix}"
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("-n", name, "link", "set", "lo", "up")
    return name


def wire(first: tuple[str, str, str], second: tuple[str, str, str]) -> None:
    """A pair of devices; each end is its namespace ("": this one), its device and its address. It goes with either namespace."""
    ip("link", "add", first[1], "type", "veth", "peer", "name", second[1])
    for where, device, address in (first, second):
        if where:
            ip("link", "set", device, "netns", where)
        inside = ("-n", where) if where else ()
        ip(*inside, "addr", "add", f"{address}/30", "dev", device)
        ip(*inside, "link", "set", device, "up")


@contextmanager
def namespaces(names: list[str]) -> Iterator[Namespaces]:
    """A namespace for a gateway and one for each engine, until the block ends. Raises subprocess.CalledProcessError."""
    with ExitStack() as stack:
        gateway = namespace(stack, "gateway")
        device = f"hr{os.getpid() % 100_000}"
        wire(("", f"{device}h", "10.251.0.1"), (gateway, f"{device}g", "10.251.0.2"))
        engines, links = {}, {}
        for number, name in enumerate(names, 1):
            engine = namespace(stack, name)
            near, far = f"{device}n{number}", f"{device}f{number}"
            wire((gateway, near, f"10.251.{number}.1"), (engine, far, f"10.251.{number}.2"))
            engines[name] = Place(f"10.251.{number}.2", engine)
            to_engine, to_gateway = Outlet(gateway, near, f"10.251.{number}.2"), Outlet(engine, far, f"10.251.{number}.1")
            links[name] = NamespaceLink({Direction.TO_SERVER: to_engine, Direction.TO_CLIENT: to_gateway})
        yield Namespaces(Place("10.251.0.2", gateway), engines, links)
