"""Jobs and clusters that the tests of cost and control share."""

from __future__ import annotations

from lightning_nereus.job import (
    Cluster,
    DeviceSpec,
    Head,
    JobSpec,
    LengthStats,
    LinkSpec,
    ModelShape,
    Role,
    Workload,
)

ACTOR = ModelShape(layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64, vocab=32000, tied=True)
SCORER = ModelShape(
    layers=4, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64, vocab=32000, head=Head.SCORE
)
GRPO = JobSpec.of({Role.ACTOR: ACTOR, Role.REFERENCE: ACTOR})
PPO = JobSpec.of({Role.ACTOR: ACTOR, Role.REFERENCE: ACTOR, Role.REWARD: SCORER, Role.CRITIC: SCORER})


def cluster(devices_per_node: int = 8, nodes: int = 1, *, memory_gib: float = 80.0, slots: int = 0) -> Cluster:
    return Cluster(
        "test",
        nodes,
        devices_per_node,
        DeviceSpec("accelerator", peak_flops=100e12, memory_bytes=memory_gib * 2**30, memory_bandwidth=2e12),
        LinkSpec("intra", bandwidth=100e9, latency=5e-6),
        LinkSpec("inter", bandwidth=10e9, latency=2e-5),
        slots,
    )


def workload(length: float = 256.0, *, rows: int = 64, minibatches: int = 2) -> Workload:
    return Workload(rows, 64.0, LengthStats.constant(length), 8192, minibatches)
