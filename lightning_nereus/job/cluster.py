"""Devices, links and clusters: what the job runs on, as peaks and capacities."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_nereus.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator. FLOP/s at the job's precision, bytes, bytes/s."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float

    def __post_init__(self) -> None:
        for field in ("peak_flops", "memory_bytes", "memory_bandwidth"):
            if not getattr(self, field) > 0:
                raise ConfigurationError(
                    f"cluster.device.{field}", f"{getattr(self, field)} is not positive", "Use a peak above 0"
                )


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link type between two devices: bytes/s in one direction, seconds a message."""

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ConfigurationError(
                f"cluster link {self.name}",
                "bandwidth must be above 0 and latency not negative",
                "Mend the description",
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A homogeneous cluster; device ``d`` lives on node ``d // devices_per_node``.

    ``compute_slots`` is the number of devices of one node that can compute at full rate at the
    same time, where the devices share it (ranks that are forked on a few cores, time-sliced GPUs);
    0 says that each has its own.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_link: LinkSpec
    inter_link: LinkSpec
    compute_slots: int = 0

    def __post_init__(self) -> None:
        for field in ("nodes", "devices_per_node"):
            if getattr(self, field) < 1:
                raise ConfigurationError(f"cluster.{field}", f"{getattr(self, field)} is too few", "Use at least 1")
        if self.compute_slots < 0:
            raise ConfigurationError("cluster.compute_slots", "is negative", "Use 0 where devices share nothing")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def node(self, device: int) -> int:
        return device // self.devices_per_node

    def link(self, a: int, b: int) -> LinkSpec:
        """The link between two devices."""
        return self.intra_link if self.node(a) == self.node(b) else self.inter_link

    def spans_nodes(self, devices: tuple[int, ...]) -> bool:
        return len({self.node(d) for d in devices}) > 1
