"""LocalLauncher: forks the ranks of one machine and outlives every one of them (design §9).

The store lives here, in the parent, which trains nothing. A fork after the imports costs next to
nothing and keeps workers from parsing the command line again. The first error of any rank ends the
run, once, with its own type; a rank that dies without a word ends it with :class:`PeerLostError`.
No path leaves a process behind.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from torch._C._distributed_c10d import TCPStore

from lightning_nereus.errors import NereusError, PeerLostError
from lightning_nereus.runtime.world import WorkerContext

# A killed rank breaks its peers' connections within milliseconds, so that their errors may reach the parent
# before the kernel reports the death; who died is looked up this long before an error is believed.
DEATH_SECONDS = 0.5
# What a rank that is done may take to exit before it is killed.
EXIT_SECONDS = 30.0
_HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


@dataclass
class _Worker:
    rank: int
    pid: int
    pipe: int
    start: int
    received: bytearray = field(default_factory=bytearray)
    message: dict[str, Any] | None = None
    status: int | None = None
    open: bool = True


class LocalLauncher(_Launcher):
    """Runs a Trainer function in ``num_processes`` forked ranks.

    Args:
        num_processes: ranks of the job.
        enter: called in each rank before anything else.
        prepare: called in the parent with the function's arguments before any rank starts; may refuse by raising.
        collect: called in rank 0 at the end; what it returns goes to ``restore`` in the parent.
        restore: called in the parent with what ``collect`` gave.
    """

    def __init__(
        self,
        num_processes: int,
        *,
        enter: Callable[[WorkerContext], None],
        prepare: Callable[[Trainer | None, tuple[Any, ...]], None],
        collect: Callable[[Trainer], dict[str, Any]],
        restore: Callable[[Trainer, dict[str, Any]], None],
    ) -> None:
        self.num_processes = num_processes
        self._enter = enter
        self._prepare = prepare
        self._collect = collect
        self._restore = restore
        self._workers: list[_Worker] = []

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` in every rank and return what rank 0 returned.

        Raises:
            PeerLostError: if a rank died without an error of its own.
            BaseException: the first error that a rank raised.
        """
        self._prepare(trainer, (*args, *kwargs.values()))
        if torch.cuda.is_initialized():
            raise NereusError("CUDA was initialised before the ranks were forked; do not touch it before fit()")
        sys.stdout.flush()
        sys.stderr.flush()
        self._workers = []
        try:
            for rank in range(self.num_processes):
                self._workers.append(self._fork(rank, trainer, function, args, kwargs))
            # Only now: a fork may catch the store's thread while it holds a lock, which the child would wait for.
            store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10))
            for worker in self._workers:
                os.write(worker.start, store.port.to_bytes(4, "big"))
            self._await()
        finally:
            self._stop()
        outcome = self._workers[0].message or {}
        if trainer is not None and outcome.get("trainer") is not None:
            self._restore(trainer, outcome["trainer"])
        return outcome.get("result")

    def kill(self, signum: Any) -> None:
        for worker in self._workers:
            if worker.status is None:
                os.kill(worker.pid, signum)

    # The rank's side

    def _fork(self, rank: int, trainer: Trainer | None, function: Callable, args: Any, kwargs: Any) -> _Worker:
        parent = os.getpid()
        reading, writing = os.pipe()
        waiting, start = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            os.close(waiting)
            return _Worker(rank, pid, reading, start)
        code = 1
        # A store that the parent dropped must not be collected here: its destructor waits for a thread that
        # the fork left behind.
        gc.freeze()
        try:
            os.close(reading)
            for sibling in self._workers:
                os.close(sibling.pipe)
                os.close(sibling.start)
            os.close(start)
            _die_with(parent)
            # A forked OpenMP pool has lost its threads and would wait for them.
            torch.set_num_threads(1)
            port = int.from_bytes(os.read(waiting, 4), "big")
            context = WorkerContext(rank, self.num_processes, _HOST, port)
            failed, message = self._run(context, trainer, function, args, kwargs)
            _write(writing, message)
            code = 0
            if failed:
                # Peers must not see this rank's connections break before the parent knows why.
                time.sleep(60)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(
        self, context: WorkerContext, trainer: Trainer | None, function: Callable, args: Any, kwargs: Any
    ) -> tuple[bool, bytes]:
        """Whether this rank failed, and what to tell the parent of it."""
        try:
            self._enter(context)
            result = function(*args, **kwargs)
            if context.rank != 0:
                return False, pickle.dumps({})
            ran = self._collect(trainer) if trainer is not None else None
            return False, pickle.dumps({"result": result, "trainer": ran})
        except BaseException as error:
            return True, pickle.dumps({"error": _portable(error, context.rank)})

    # The parent's side

    def _await(self) -> None:
        """Collect every rank's message; raise the first error once it is sure whose fault it is."""
        while waiting := [w for w in self._workers if w.open]:
            ready, _, _ = select.select([w.pipe for w in waiting], [], [])
            for worker in waiting:
                if worker.pipe in ready:
                    self._read(worker)
            for worker in self._workers:
                if not worker.open and worker.message is None:
                    raise self._lost(worker)
            failed = [w for w in self._workers if w.message and "error" in w.message]
            if failed:
                raise self._cause(failed)

    def _read(self, worker: _Worker) -> None:
        data = os.read(worker.pipe, 1 << 20)
        if data:
            worker.received += data
            if len(worker.received) >= 8 and len(worker.received) - 8 == int.from_bytes(worker.received[:8], "big"):
                worker.message = pickle.loads(bytes(worker.received[8:]))
        else:
            worker.open = False

    def _cause(self, failed: list[_Worker]) -> BaseException:
        """A rank that died explains its peers' broken connections; else the first error that is none."""
        end = time.monotonic() + DEATH_SECONDS
        while (left := end - time.monotonic()) > 0:
            waiting = [w for w in self._workers if w.open]
            ready, _, _ = select.select([w.pipe for w in waiting], [], [], left)
            for worker in waiting:
                if worker.pipe in ready:
                    self._read(worker)
                    if not worker.open and worker.message is None:
                        return self._lost(worker)
            failed = [w for w in self._workers if w.message and "error" in w.message]
            if any(not _is_connection(w) for w in failed):
                break
        errors = [w for w in failed if not _is_connection(w)] or failed
        return errors[0].message["error"]["exception"]  # type: ignore[index]

    def _lost(self, worker: _Worker) -> PeerLostError:
        _, status = os.waitpid(worker.pid, 0)
        worker.status = status
        if os.WIFSIGNALED(status):
            how = f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            how = f"exited with code {os.waitstatus_to_exitcode(status)}"
        return PeerLostError(f"rank {worker.rank} (process {worker.pid}) {how}; the other ranks were stopped")

    def _stop(self) -> None:
        """Leave no process: those that are done exit by themselves, others are killed.

        No SIGTERM first: Lightning answers it with a broadcast, in the middle of whatever its peers exchange.
        """
        if all(w.message is not None and "error" not in w.message for w in self._workers):
            self._reap(time.monotonic() + EXIT_SECONDS)
        self.kill(signal.SIGKILL)
        for worker in self._workers:
            if worker.status is None:
                _, worker.status = os.waitpid(worker.pid, 0)
            os.close(worker.pipe)
            os.close(worker.start)

    def _reap(self, end: float) -> None:
        while True:
            for worker in self._workers:
                if worker.status is None:
                    pid, status = os.waitpid(worker.pid, os.WNOHANG)
                    worker.status = status if pid else None
            if all(w.status is not None for w in self._workers) or time.monotonic() >= end:
                return
            time.sleep(0.01)


def _die_with(parent: int) -> None:
    """End this process when its parent ends, however that happens, and leave Ctrl-C to the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _portable(error: BaseException, rank: int) -> dict[str, Any]:
    """The error as it can travel, with the rank's traceback as a note."""
    text = "".join(traceback.format_exception(error))
    connection = isinstance(error, dist.DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
    travelling: BaseException = error
    try:
        travelling = pickle.loads(pickle.dumps(error))
        if type(travelling) is not type(error):
            raise TypeError
    except Exception:
        travelling = RuntimeError(f"{type(error).__name__}: {error}")
    travelling.__traceback__ = None
    travelling.add_note(f"on rank {rank}:\n{text}")
    return {"exception": travelling, "connection": connection}


def _is_connection(worker: _Worker) -> bool:
    return bool(worker.message and worker.message["error"]["connection"])


def _write(pipe: int, message: bytes) -> None:
    data = len(message).to_bytes(8, "big") + message
    while data:
        data = data[os.write(pipe, data) :]
