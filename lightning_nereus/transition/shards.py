"""ShardMap: which index range of which tensor a device holds under a layout (design §5).

Names of parameters, their global shapes, the pipeline stage that owns them and the rule by which
tensor parallelism cuts them. Plain data: a backend builds it from a real model, the simulator
from a ModelShape. Optimizer tensors follow their parameter's shard.

Every cut is made by balanced, nested ranges: ``[n * r // k, n * (r + 1) // k)``. For ``k`` a
multiple of ``k'`` each range lies inside one of the ranges for ``k'``, which is what lets Split and
Merge work on whole sub-shards even when nothing divides (paper §5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Layout

FIRST = "first"
LAST = "last"
BOTH = "first+last"


def balanced(total: int, parts: int, index: int) -> tuple[int, int]:
    """Range ``[start, stop)`` of part ``index`` when ``total`` things are cut into ``parts``."""
    return total * index // parts, total * (index + 1) // parts


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor parallelism cuts one dimension of a parameter.

    The dimension is ``units`` indivisible pieces; ``rows_per_unit`` rows belong to a *group* of
    ``group`` pieces. Query projections: units = heads, group 1, rows = head_dim. Key and value
    projections: units = query heads, group = query heads per kv head, rows = head_dim, so that a
    rank holds every kv head that one of its query heads reads; ranges overlap when kv heads < tp.
    Vocabulary and MLP rows: units = rows, group 1, one row each.
    """

    dim: int
    units: int
    group: int = 1
    rows_per_unit: int = 1

    def range(self, tp: int, tensor_rank: int) -> tuple[int, int]:
        """Rows ``[start, stop)`` of the dimension on one tensor rank."""
        start, stop = balanced(self.units, tp, tensor_rank)
        return start // self.group * self.rows_per_unit, -(-stop // self.group) * self.rows_per_unit

    def overlaps(self, tp: int) -> bool:
        """Whether two tensor ranks hold the same row."""
        return any(self.range(tp, t)[1] > self.range(tp, t + 1)[0] for t in range(tp - 1))


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter. ``owner`` is a layer index, FIRST, LAST or BOTH (a tied embedding).

    ``partial_gradient`` says that each tensor rank computes only its own part of the gradient of a
    replicated parameter (norms over heads), so that the parts must be summed.
    """

    name: str
    shape: tuple[int, ...]
    owner: int | str
    cut: TensorCut | None = None
    partial_gradient: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a global tensor: for each dimension ``[start, stop)``."""

    name: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """Indices of this box inside ``outer``'s tensor.

        Raises:
            ValueError: if it does not lie inside.
        """
        for (start, stop), (low, high) in zip(self.ranges, outer.ranges, strict=True):
            if start < low or stop > high:
                raise ValueError(f"{self} does not lie inside {outer}")
        return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(self.ranges, outer.ranges, strict=True))


@dataclass(frozen=True, slots=True)
class ShardMap(Mapping[str, ParamSpec]):
    """All parameters of one model. ``heads`` bounds tp, ``layers`` bounds pp."""

    params: tuple[ParamSpec, ...]
    layers: int
    heads: int
    _index: dict[str, ParamSpec] = field(init=False, repr=False, compare=False, hash=False)
    _elements: dict[tuple[Layout, int], int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {p.name: p for p in self.params})
        object.__setattr__(self, "_elements", {})

    def __getitem__(self, name: str) -> ParamSpec:
        return self._index[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def check(self, layout: Layout) -> None:
        """Refuse a layout that this model cannot take.

        Raises:
            ConfigurationError: naming the degree and the ones that work.
        """
        if self.heads % layout.tp:
            fits = [d for d in range(1, self.heads + 1) if self.heads % d == 0]
            raise ConfigurationError(
                "tp", f"{layout.tp} does not divide {self.heads} attention heads", f"Use one of {fits}"
            )
        if layout.pp > self.layers:
            raise ConfigurationError("pp", f"{layout.pp} stages for {self.layers} layers", f"Use at most {self.layers}")

    def layer_range(self, pp: int, pipeline_rank: int) -> tuple[int, int]:
        """Decoder layers ``[start, stop)`` of one pipeline stage."""
        return balanced(self.layers, pp, pipeline_rank)

    def _owns(self, spec: ParamSpec, pp: int, pipeline_rank: int) -> bool:
        if isinstance(spec.owner, int):
            start, stop = self.layer_range(pp, pipeline_rank)
            return start <= spec.owner < stop
        first, last = pipeline_rank == 0, pipeline_rank == pp - 1
        return {FIRST: first, LAST: last, BOTH: first or last}[spec.owner]

    def slice(self, name: str, layout: Layout, position: int) -> Slice | None:
        """The part of one parameter at a position of a layout, or None when it holds none."""
        spec = self._index[name]
        pipeline_rank, tensor_rank = layout.ranks(position)
        if not self._owns(spec, layout.pp, pipeline_rank):
            return None
        ranges = [(0, size) for size in spec.shape]
        if spec.cut is not None:
            ranges[spec.cut.dim] = spec.cut.range(layout.tp, tensor_rank)
        return Slice(name, tuple(ranges))

    def shard(self, layout: Layout, position: int) -> dict[str, Slice]:
        """Every slice at a position of a layout, in the map's order."""
        slices = ((name, self.slice(name, layout, position)) for name in self._index)
        return {name: piece for name, piece in slices if piece is not None}

    def elements(self, layout: Layout, position: int) -> int:
        """Elements that a position of a layout holds. Remembered: planning asks again and again."""
        key = layout, position
        if key not in self._elements:
            self._elements[key] = sum(piece.elements for piece in self.shard(layout, position).values())
        return self._elements[key]
