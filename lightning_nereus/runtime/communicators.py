"""Process groups, made, named and closed in one place (design §3, §9).

A group is made by its members only, under a name that says the world's epoch and the ranks in their
order. Nothing is counted: torch's own names hash how many groups a process has made before, so that
members with different histories would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Communicators:
    """The groups of one world, each made once and kept until the world closes.

    Args:
        store: reachable by every rank, under a prefix that no other world uses.
        rank: this process; ``world_size`` the number of processes.
        epoch: of the world; part of every group's name.
        timeout: deadline of each collective.
    """

    def __init__(self, store: c10d.Store, rank: int, world_size: int, epoch: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch
        self.timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of ``ranks``, numbered in their order; None for a single rank.

        Every member must ask for it, others must not. Two members ask for the groups that they
        share in the same order, as everything that asks is compiled alike on every rank.

        Raises:
            ValueError: if this rank is no member.
        """
        members = tuple(ranks)
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} asked for a group of {members}")
        if len(members) == 1:
            return None
        if members not in self._groups:
            self._groups[members] = self._make(members)
        return self._groups[members]

    def _make(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        name = c10d.GroupName(f"nereus-{self.epoch}-{'-'.join(map(str, members))}")
        made, _ = c10d._new_process_group_helper(
            len(members),
            members.index(self.rank),
            list(members),
            c10d.Backend("gloo"),
            self.store,
            group_name=name,
            timeout=self.timeout,
        )
        c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
        return made  # type: ignore[return-value]

    def close(self) -> None:
        """Destroy every group. Whoever waits in one of them is freed with an error."""
        while self._groups:
            _, group = self._groups.popitem()
            dist.destroy_process_group(group)
