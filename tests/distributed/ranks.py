"""A pool of forked gloo ranks that many tests share: imports are paid once, a task costs milliseconds.

    results = pool.run(function, *args)      # function(rank, communicators, *args) on every rank

``function`` must be importable at the module's top level; what it returns comes back by rank.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_nereus.runtime.world import WorkerContext, World

TASK_SECONDS = 300


class RankError(AssertionError):
    """A task failed on a rank; carries that rank's traceback."""


class RankPool:
    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # After the forks: one that caught the store's thread with a lock held would never join.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send(self._store.port)

    def run(self, function: Any, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TASK_SECONDS if not errors else 2):
                errors.append(f"rank {rank} did not answer")
                continue
            good, value = pipe.recv()
            results.append(value) if good else errors.append(f"rank {rank}: {value}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return results

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # stores that the parent dropped wait in their destructor for threads that the fork left behind
    context = WorkerContext(rank, size, "127.0.0.1", pipe.recv())
    world = World.join(context, timeout=timedelta(seconds=60))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(context.rank, world.communicators, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
