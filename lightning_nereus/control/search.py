"""Search: the fastest combinations of options that fit in memory together, exactly (paper §4.2, Eq. 1).

Stages add up, apart from two couplings: actor and critic score rows beside reference and reward, and all
model-stages of a device share its memory. Combinations of one stage are arrays, so that tens of thousands of them
are bounded and checked at a time; only those that could be among the best are looked at one by one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_nereus.control.options import Option
from lightning_nereus.cost import CostModel, LinkType
from lightning_nereus.cost.model import Task, makespan
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Stage

# Predictions that differ by less are the same: sums in another order differ by 1e-16.
TIE = 1e-9
# Combinations that are checked at a time: few at first, as the best often come first.
FIRST_CHUNK, LARGEST_CHUNK = 64, 8192

Floats = NDArray[np.float64]
Found = tuple[float, float, tuple[Option, ...]]
"""Step seconds, rounded so that ties are equal; elements moved; the options of all model-stages."""


class _Columns:
    """The options of one model-stage as arrays; memory as [options, devices of the pool]."""

    def __init__(self, options: Sequence[Option], pool: Sequence[int]) -> None:
        column = {device: i for i, device in enumerate(pool)}
        self.held = np.zeros((len(options), len(pool)))
        for row, option in enumerate(options):
            self.held[row, [column[d] for d in option.devices]] = 1.0
        memory = np.array([(o.memory.resident, o.memory.transient) for o in options]).reshape(-1, 2)
        self.resident, self.transient = self.held * memory[:, :1], self.held * memory[:, 1:]
        self.count = self.held.sum(axis=1)
        self.nodes = np.array([float(o.nodes) for o in options])
        self.moved = np.array([o.moved for o in options])
        parts = [(o.work.scoring, o.work.main) for o in options]
        self.scoring = np.array([(s.compute, sum(s.communication.values())) for s, _ in parts]).reshape(-1, 2)
        self.main = np.array([(m.compute, sum(m.communication.values())) for _, m in parts]).reshape(-1, 2)


class StageChoices:
    """Every combination of options of one stage's model-stages, of which there are none, one or two.

    ``seconds`` [n] of their own work and ``scoring`` [n] of their scoring, where those that share devices take
    turns; ``moved`` [n] in elements.
    """

    def __init__(self, options: Sequence[Sequence[Option]], model: CostModel, pool: Sequence[int]) -> None:
        assert len(options) <= 2, "no stage has more than two model-stages"
        self.options = [list(each) for each in options]
        self._columns = [_Columns(each, pool) for each in options]
        self._devices = len(pool)
        self.shape = tuple(len(each) for each in options)
        # Seconds of each model-stage's own work, by choice.
        self._works: list[Floats] = []
        if not options:
            self.seconds = self.scoring = self.moved = np.zeros(1)
        elif len(options) == 1:
            (own,) = self._columns
            slowdown = model.slowdowns(own.nodes, own.count)
            self.seconds = own.main[:, 0] * slowdown + own.main[:, 1]
            self.scoring = own.scoring[:, 0] * slowdown + own.scoring[:, 1]
            self.moved = own.moved
            self._works = [self.seconds]
        else:
            self._pair(model)

    def _pair(self, model: CostModel) -> None:
        a, b = self._columns
        apart = a.held @ b.held.T == 0
        both = a.count[:, None] + b.count[None, :]
        slow_a = model.slowdowns(a.nodes[:, None], np.where(apart, both, a.count[:, None]))
        slow_b = model.slowdowns(b.nodes[None, :], np.where(apart, both, b.count[None, :]))

        def together(x: Floats, y: Floats) -> tuple[Floats, list[Floats]]:
            first = x[:, None, 0] * slow_a + x[:, None, 1]
            second = y[None, :, 0] * slow_b + y[None, :, 1]
            return np.where(apart, np.maximum(first, second), first + second).ravel(), [first.ravel(), second.ravel()]

        self.seconds, self._works = together(a.main, b.main)
        self.scoring, _ = together(a.scoring, b.scoring)
        self.moved = (a.moved[:, None] + b.moved[None, :]).ravel()

    def __len__(self) -> int:
        return len(self.seconds)

    def choice(self, index: int) -> tuple[Option, ...]:
        if not self.options:
            return ()
        rows = np.unravel_index(index, self.shape)
        return tuple(each[int(row)] for each, row in zip(self.options, rows, strict=True))

    def loads(self, indices: NDArray[np.int64]) -> Floats:
        """Seconds of work on each device, [indices, devices]."""
        loads = np.zeros((len(indices), self._devices))
        if self.options:
            rows_of = np.unravel_index(indices, self.shape)
            for columns, rows, seconds in zip(self._columns, rows_of, self._works, strict=True):
                loads += columns.held[rows] * seconds[indices, None]
        return loads

    def memory(self, indices: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Bytes (resident, transient), each [indices, devices]."""
        resident = np.zeros((len(indices), self._devices))
        transient = np.zeros_like(resident)
        if self.options:
            for columns, rows in zip(self._columns, np.unravel_index(indices, self.shape), strict=True):
                resident += columns.resident[rows]
                transient = np.maximum(transient, columns.transient[rows])
        return resident, transient


def best(
    choices: Mapping[Stage, StageChoices], k: int, limit: float | None, model: CostModel, pool: Sequence[int]
) -> list[Found]:
    """The ``k`` best combinations. One is left out only where a lower bound of its seconds is above the k-th best's,
    or, with a ``limit`` in bytes, where it overfills a device.
    """
    generation, inference, training = (choices[stage] for stage in Stage)
    if not (len(generation) and len(inference) and len(training)):
        return []
    generations = _by_seconds(generation)
    least_generation = generations[0][0]
    generation_memory = generation.memory(np.array([index for _, index, _ in generations]))
    order = np.lexsort((inference.moved, inference.seconds))
    inference_seconds = inference.seconds[order]
    bounds = training.seconds + np.maximum(training.scoring, inference_seconds[0])
    found: list[Found] = []

    def worst() -> float:
        return found[-1][0] * (1 + TIE) if len(found) == k else np.inf

    for index in np.argsort(bounds, kind="stable"):
        if bounds[index] + least_generation > worst():
            break
        own = training.memory(np.array([index]))
        if limit is not None and not (_overlaid(own, generation_memory) <= limit).all(axis=1).any():
            continue
        trained = training.choice(int(index))
        scoring = _tasks(trained, model, scoring=True)
        rest = float(training.seconds[index]) + least_generation
        least = np.maximum(training.scoring[index], inference_seconds) + rest
        busy = _device_seconds(scoring, pool)
        for position in _candidates(inference, order, least, busy, rest, worst, own, limit):
            asked = inference.choice(int(order[position]))
            scored = float(training.seconds[index]) + makespan((*_tasks(asked, model, scoring=False), *scoring))
            if scored + least_generation > worst():
                continue
            asked_memory = inference.memory(order[position : position + 1])
            full = _overlaid(generation_memory, own, asked_memory).max(axis=1)
            for (seconds, _, made), needed in zip(generations, full, strict=True):
                if scored + seconds > worst():
                    break
                if limit is not None and needed > limit:
                    continue
                options = (*made, *asked, *trained)
                total = scored + _generation_seconds(made, _link(options, model), seconds)
                if total > worst():
                    continue
                moved = sum(option.moved for option in options)
                bisect.insort(found, (float(f"{total:.10g}"), moved, options), key=lambda entry: entry[:2])
                del found[k:]
    return found


def _candidates(
    inference: StageChoices,
    order: NDArray[np.int64],
    least: Floats,
    busy: Floats,
    rest: float,
    worst: Callable[[], float],
    own: tuple[Floats, Floats],
    limit: float | None,
) -> Iterator[int]:
    """Positions in ``order`` that may be among the best and fit beside ``own``.

    ``least`` is a bound that grows with the position. Another is ``rest`` and what the busiest device has to do,
    of which ``busy`` [devices] is the scoring.
    """
    start, size = 0, FIRST_CHUNK
    while start < len(order) and least[start] <= worst():
        stop = start + int(np.searchsorted(least[start : start + size], worst(), side="right"))
        chosen = order[start:stop]
        possible = (inference.loads(chosen) + busy).max(axis=1) + rest <= worst()
        if limit is not None:
            possible &= (_overlaid(inference.memory(chosen), own) <= limit).all(axis=1)
        yield from (np.nonzero(possible)[0] + start).tolist()
        if stop < start + size:
            return
        start, size = stop, min(4 * size, LARGEST_CHUNK)


def _overlaid(*stages: tuple[Floats, Floats]) -> Floats:
    """Bytes of (resident, transient) memories on the same devices: residents add up, the largest transient counts."""
    transient = stages[0][1]
    for _, other in stages[1:]:
        transient = np.maximum(transient, other)
    return sum((resident for resident, _ in stages), transient)


def _device_seconds(tasks: Sequence[Task], pool: Sequence[int]) -> Floats:
    return np.array([sum(seconds for devices, seconds in tasks if device in devices) for device in pool])


def _by_seconds(generation: StageChoices) -> list[tuple[float, int, tuple[Option, ...]]]:
    """(least seconds with the weights' way there, index, options), fastest first."""
    made = [generation.choice(index) for index in range(len(generation))]
    entries = [
        (float(seconds) + sum(o.synchronisation.get(LinkType.INTRA, 0.0) for o in options), index, options)
        for index, (seconds, options) in enumerate(zip(generation.seconds, made, strict=True))
    ]
    return sorted(entries, key=lambda entry: entry[:2])


def _generation_seconds(made: Sequence[Option], link: LinkType, least: float) -> float:
    """Seconds of generation where the weights come over ``link`` and not over the fastest."""
    slower = sum(o.synchronisation.get(link, 0.0) - o.synchronisation.get(LinkType.INTRA, 0.0) for o in made)
    return least + slower


def _tasks(options: Sequence[Option], model: CostModel, *, scoring: bool) -> list[Task]:
    """What the model-stages of one stage have to do, each with those beside it at work."""
    tasks = []
    for option in options:
        beside = [o.devices for o in options if o.devices.isdisjoint(option.devices)]
        slowdown = model.slowdown(option.nodes, len(option.devices.union(*beside)))
        work = option.work.scoring if scoring else option.work.main
        tasks.append((option.devices, work.total(slowdown)))
    return tasks


def _link(options: Sequence[Option], model: CostModel) -> LinkType:
    """The link between the actor's training and generation devices."""
    actor = [o.devices for o in options if o.model_stage in (ACTOR_GENERATION, ACTOR_TRAINING)]
    return LinkType.INTER if model.cluster.spans_nodes(tuple(frozenset().union(*actor))) else LinkType.INTRA
