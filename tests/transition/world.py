"""What the transition tests share: the plan space, a small model, and an executor of symbols."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_nereus.job import Layout, ModelShape, ModelStage, Plan, StagePlan
from lightning_nereus.transition import Destroy, Extend, Merge, Primitive, ShardMap, Split, UnitId, shard_map_of

DEGREES = (1, 2, 4, 8)

# Odd sizes on purpose: grouped queries with fewer kv heads than tp, tied ends, nothing divides.
SHAPE = ModelShape(
    layers=9, hidden=6, intermediate=13, heads=8, kv_heads=2, head_dim=2, vocab=19, tied=True, qk_norm=True
)
SHARD_MAP = shard_map_of(SHAPE)


def plan_space(devices: int, *, first: int = 0) -> Iterator[StagePlan]:
    """Every (tp, pp) of powers of two and every dp on up to ``devices`` devices in natural order."""
    for tp in DEGREES:
        for pp in DEGREES:
            for dp in range(1, devices // (tp * pp) + 1):
                yield StagePlan(Layout(tp, pp), dp, tuple(range(first, first + dp * tp * pp)))


def units(plan: Plan, model_stages: Iterable[ModelStage] | None = None) -> set[UnitId]:
    return {
        UnitId(m, stage_plan.layout, devices)
        for m, stage_plan in plan.items()
        for devices in stage_plan.units
        if model_stages is None or m in model_stages
    }


class World:
    """Devices that hold the rows of each (unit, position) as sets of (parameter, row index, ...) boxes.

    Carries primitives out as the engine does and fails where an input is not there or a shard does
    not enclose what is sliced from it.
    """

    def __init__(self, plan: Plan, shard_map: ShardMap = SHARD_MAP) -> None:
        self.shard_map = shard_map
        self.received = 0
        self.peaks: dict[int, int] = {}
        self.held: dict[tuple[int, UnitId], dict[str, tuple[tuple[int, int], ...]]] = {}
        for unit in units(plan):
            for position, device in enumerate(unit.devices):
                self.held[device, unit] = self.boxes(unit, position)
        self._note(plan.devices)

    def _note(self, devices: Iterable[int]) -> None:
        """Remember what the devices hold now if it is more than ever before, in elements."""
        for device in devices:
            now = sum(self.elements(d, u) for d, u in self.held if d == device)
            self.peaks[device] = max(self.peaks.get(device, 0), now)

    def boxes(self, unit: UnitId, position: int) -> dict[str, tuple[tuple[int, int], ...]]:
        return {name: piece.ranges for name, piece in self.shard_map.shard(unit.layout, position).items()}

    def elements(self, device: int, unit: UnitId) -> int:
        total = 0
        for ranges in self.held[device, unit].values():
            volume = 1
            for start, stop in ranges:
                volume *= stop - start
            total += volume
        return total

    def run(self, order: Iterable[Primitive]) -> None:
        for operation in order:
            match operation:
                case Split(unit, subs):
                    self._split(unit, subs)
                case Merge(subs, unit):
                    self._merge(subs, unit)
                case Extend(source, target):
                    for position, (giver, taker) in enumerate(zip(source.devices, target.devices, strict=True)):
                        given = self.held[giver, source]
                        assert given == self.boxes(target, position)
                        assert (taker, target) not in self.held
                        self.received += self.elements(giver, source) if giver != taker else 0
                        self.held[taker, target] = given
                    self._note(target.devices)
                case Destroy(unit):
                    replicas = {u for _, u in self.held if u.model_stage == unit.model_stage and u != unit}
                    assert any(self.complete(u) for u in replicas), f"{unit} held the only copy"
                    for device in unit.devices:
                        del self.held[device, unit]

    def complete(self, unit: UnitId) -> bool:
        """Whether the unit is there and holds each row of each parameter."""
        if any((device, unit) not in self.held for device in unit.devices):
            return False
        for name, spec in self.shard_map.items():
            dim = spec.cut.dim if spec.cut else 0
            ranges = [self.held[d, unit][name][dim] for d in unit.devices if name in self.held[d, unit]]
            if set().union(*(range(*r) for r in ranges)) != set(range(spec.shape[dim])):
                return False
        return True

    def _split(self, unit: UnitId, subs: tuple[UnitId, ...]) -> None:
        """Each device ends with what the members of its group held, and with no other rows."""
        made = {}
        for sub in subs:
            for position, device in enumerate(sub.devices):
                members = {other.devices[position] for other in subs}
                gathered: dict[str, list[tuple[tuple[int, int], ...]]] = {}
                for member in members:
                    if member != device:
                        self.received += self.elements(member, unit)
                    for name, box in self.held[member, unit].items():
                        gathered.setdefault(name, []).append(box)
                wanted = self.boxes(sub, position)
                assert gathered.keys() == wanted.keys()
                for name, box in wanted.items():
                    for dim, (start, stop) in enumerate(box):
                        rows = set().union(*(range(*held[dim]) for held in gathered[name]))
                        assert rows == set(range(start, stop)), "the enclosing group holds other rows"
                made[device, sub] = wanted
        assert not made.keys() & self.held.keys()
        self.held.update(made)
        self._note(unit.devices)
        for device in unit.devices:
            del self.held[device, unit]

    def _merge(self, subs: tuple[UnitId, ...], unit: UnitId) -> None:
        for position, device in enumerate(unit.devices):
            (sub,) = (s for s in subs if device in s.devices)
            outer = self.held[device, sub]
            inner = self.boxes(unit, position)
            for name, box in inner.items():
                for (start, stop), (low, high) in zip(box, outer[name], strict=True):
                    assert low <= start
                    assert stop <= high
            assert (device, unit) not in self.held
            self.held[device, unit] = inner
            self._note([device])
            del self.held[device, sub]

    def assert_is(self, plan: Plan) -> None:
        expected = World(plan, self.shard_map).held
        assert self.held == expected
