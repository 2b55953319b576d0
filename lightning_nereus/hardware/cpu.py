"""This machine's CPU as a cluster: forked ranks that share its cores and its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Cluster, DeviceSpec, LinkSpec

_SIDE = 256
_COPY_ELEMENTS = 2**22
_REPEATS = 7
# gloo sends through the loopback interface: both ends copy, and wake one another up.
_LINK_SHARE = 0.25
_MESSAGE_SECONDS = 1e-4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def describe_cpu(devices: int, dtype: torch.dtype = torch.float32, memory_bytes: float | None = None) -> Cluster:
    """Measure one core and describe ``devices`` ranks on this machine's cores. Takes about 50 ms.

    Args:
        dtype: of the job's arithmetic.
        memory_bytes: what each rank may use; an equal share of the machine's memory when None. A smaller value
            emulates devices whose memory binds.

    Raises:
        ConfigurationError: if there is no device or no memory.
    """
    if devices < 1:
        raise ConfigurationError("cluster.devices", f"{devices} is too few", "Use at least 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank computes on one core
    try:
        square = torch.ones(_SIDE, _SIDE, dtype=dtype)
        flops = 2 * _SIDE**3 / _seconds(lambda: square @ square)
        block = torch.ones(_COPY_ELEMENTS, dtype=torch.uint8)
        bandwidth = 2 * _COPY_ELEMENTS / _seconds(block.clone)
    finally:
        torch.set_num_threads(threads)
    link = LinkSpec("loopback", bandwidth * _LINK_SHARE, _MESSAGE_SECONDS)
    memory = _memory_bytes() / devices if memory_bytes is None else memory_bytes
    return Cluster(
        "cpu", 1, devices, DeviceSpec("core", flops, memory, bandwidth), link, link, len(os.sched_getaffinity(0))
    )


def _seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _memory_bytes() -> float:
    """Of the machine, or of the container if that has less."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        return min(total, float(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total
