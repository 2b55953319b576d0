"""Every layout covers each parameter exactly, and cuts nest, so that Split and Merge need whole sub-shards only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Layout
from lightning_nereus.transition.shards import BOTH, FIRST, LAST, ParamSpec, ShardMap, TensorCut


@st.composite
def shard_maps(draw):
    kv_heads, group = draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (3, 8)]))
    heads, head_dim, hidden, vocab = kv_heads * group, 2, 6, draw(st.integers(9, 131))
    intermediate = draw(st.integers(9, 40))
    params = [ParamSpec("embed", (vocab, hidden), draw(st.sampled_from([FIRST, BOTH])), TensorCut(0, vocab))]
    layers = draw(st.integers(1, 7))
    for i in range(layers):
        params += [
            ParamSpec(f"{i}.q", (heads * head_dim, hidden), i, TensorCut(0, heads, 1, head_dim)),
            ParamSpec(f"{i}.k", (kv_heads * head_dim, hidden), i, TensorCut(0, heads, group, head_dim)),
            ParamSpec(f"{i}.o", (hidden, heads * head_dim), i, TensorCut(1, heads, 1, head_dim)),
            ParamSpec(f"{i}.down", (hidden, intermediate), i, TensorCut(1, intermediate)),
            ParamSpec(f"{i}.norm", (hidden,), i),
        ]
    params.append(ParamSpec("norm", (hidden,), LAST))
    return ShardMap(tuple(params), layers, heads)


layouts = st.builds(Layout, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))


@given(shard_maps(), layouts)
def test_each_row_is_held_and_overlaps_only_between_kv_copies(shard_map, layout):
    for spec in shard_map.params:
        dim = spec.cut.dim if spec.cut else 0
        held = [0] * spec.shape[dim]
        for position in range(layout.size):
            piece = shard_map.slice(spec.name, layout, position)
            if piece is not None:
                for row in range(*piece.ranges[dim]):
                    held[row] += 1
        if layout.pp <= shard_map.layers:
            assert min(held) >= 1
        if spec.cut and spec.cut.group == 1 and spec.owner != BOTH:
            assert max(held) == 1


@given(shard_maps(), layouts, layouts)
def test_cuts_nest(shard_map, fine, coarse):
    coarse = fine.common(coarse)
    for position in range(fine.size):
        p, t = fine.ranks(position)
        outer = coarse.position(p * coarse.pp // fine.pp, t * coarse.tp // fine.tp)
        for name, piece in shard_map.shard(fine, position).items():
            enclosing = shard_map.slice(name, coarse, outer)
            assert enclosing is not None
            assert piece.within(enclosing)


def test_layouts_that_do_not_fit_are_refused():
    shard_map = ShardMap((ParamSpec("w", (4,), 0),), layers=2, heads=6)
    with pytest.raises(ConfigurationError, match=r"tp: 4 does not divide 6 attention heads.*\[1, 2, 3, 6\]"):
        shard_map.check(Layout(4))
    with pytest.raises(ConfigurationError, match="pp: 4 stages for 2 layers"):
        shard_map.check(Layout(1, 4))
