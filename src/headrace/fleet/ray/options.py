"""What a deployment's file says of its Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.option import check_options, option
from headrace.machine.gpus import Gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    address: str = option("auto", "Where the cluster's head listens, `HOST:PORT`; `auto`: the cluster of which this machine is a node.")
    num_cpus: int = option(1, "CPUs that Ray counts for each replica, and the threads that its ranks share.", low=1)
    num_gpus: int = option(0, "GPUs of each replica, which sees no others; with 0 it computes on CPUs.", low=0)

    def checked(self) -> RayOptions:
        """Raises ConfigError."""
        check_options(self, "ray")
        if "://" in self.address:
            remedy = "Start `headrace serve` on a node of the cluster (`ray start --address HOST:PORT --num-cpus 0`)."
            raise ConfigError("ray.address", f"{self.address!r} is not HOST:PORT, and Ray's client protocol is not used", remedy)
        return self

    @property
    def bundle(self) -> Mapping[str, float]:
        """What one replica takes, in Ray's words."""
        return {"CPU": self.num_cpus, **({"GPU": self.num_gpus} if self.num_gpus else {})}

    def find_gpus(self) -> Gpus:
        """Returns the GPUs that a replica will have."""
        return Gpus(tuple(map(str, range(self.num_gpus))))
