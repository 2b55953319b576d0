"""World: who takes part in the job, over a store that no worker hosts (design §9)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lightning_nereus.runtime.communicators import Communicators

# A launcher on the same machine answers at once; this is how long a slow fork of all ranks may take.
JOIN_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a launcher tells one of its workers."""

    rank: int
    world_size: int
    store_host: str
    store_port: int


class World:
    """One epoch of the job's membership: the default process group and the named ones beside it."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators

    @classmethod
    def join(cls, context: WorkerContext, *, timeout: timedelta, epoch: int = 0) -> World:
        """Enter the world of ``epoch``. Returns when every member has entered."""
        server = TCPStore(
            context.store_host, context.store_port, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT
        )
        store = PrefixStore(f"world-{epoch}", server)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
        groups = PrefixStore("groups", store)
        return cls(Communicators(groups, context.rank, context.world_size, epoch, timeout))

    def close(self) -> None:
        """Leave: close every group, the default one last."""
        self.communicators.close()
        if dist.is_initialized():
            dist.destroy_process_group()
