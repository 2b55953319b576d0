import pytest

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_GENERATION, ACTOR_TRAINING, Layout, StagePlan
from lightning_nereus.transition import Destroy, Extend, Merge, Split, UnitId
from lightning_nereus.transition.local import decompose
from lightning_nereus.transition.primitives import joined, sub_units
from tests.transition.world import DEGREES


def unit(tp, pp, devices, model_stage=ACTOR_TRAINING):
    return UnitId(model_stage, Layout(tp, pp), tuple(devices))


def test_paper_figure_5():
    # (a) PP-Split of a (TP 2, PP 2) unit: GPUs 1 & 3 and 2 & 4 gather; TP-Split: 1 & 2 and 3 & 4.
    whole = unit(2, 2, (1, 2, 3, 4))
    pp_split = Split(whole, sub_units(whole, Layout(2, 1)))
    assert [s.devices for s in pp_split.subs] == [(1, 2), (3, 4)]
    assert pp_split.groups == ((1, 3), (2, 4))
    tp_split = Split(whole, sub_units(whole, Layout(1, 2)))
    assert [s.devices for s in tp_split.subs] == [(1, 3), (2, 4)]
    assert tp_split.groups == ((1, 2), (3, 4))


def test_sub_units_partition_and_groups_enclose():
    for layout in (Layout(tp, pp) for tp in DEGREES for pp in DEGREES):
        whole = unit(layout.tp, layout.pp, range(100, 100 + layout.size))
        for sub in {layout.common(Layout(tp, pp)) for tp in DEGREES for pp in DEGREES} - {layout}:
            subs = sub_units(whole, sub)
            assert sorted(d for s in subs for d in s.devices) == list(whole.devices)
            assert joined([s.devices for s in subs], sub, layout) == whole.devices
            for position, group in enumerate(Split(whole, subs).groups):
                p, t = sub.ranks(position)
                for device in group:
                    rank_p, rank_t = layout.ranks(whole.devices.index(device))
                    assert (rank_p * sub.pp // layout.pp, rank_t * sub.tp // layout.tp) == (p, t)


def test_what_primitives_take_and_leave():
    source, target = unit(2, 1, (0, 1)), unit(2, 1, (1, 5))
    extend = Extend(source, target)
    assert extend.participants == {0, 1, 5}
    assert extend.acquires == {1, 5}
    assert not extend.releases
    assert Destroy(source).releases == Destroy(source).participants == {0, 1}
    match extend:
        case Extend(first, second):
            assert (first, second) == (source, target)


@pytest.mark.parametrize(
    "make",
    [
        lambda: unit(2, 1, (0, 0)),
        lambda: unit(2, 1, (0,)),
        lambda: sub_units(unit(2, 2, range(4)), Layout(4, 1)),
        lambda: Split(unit(2, 1, (0, 1)), (unit(1, 1, (1,)), unit(1, 1, (0,)))),
        lambda: Merge((unit(1, 1, (0,)),), unit(1, 1, (0,))),
        lambda: Extend(unit(2, 1, (0, 1)), unit(1, 2, (2, 3))),
        lambda: Extend(unit(1, 1, (0,)), unit(1, 1, (0,))),
        lambda: Extend(unit(1, 1, (0,)), unit(1, 1, (1,), ACTOR_GENERATION)),
    ],
)
def test_impossible_primitives_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()


def kinds(graph):
    return [type(operation).__name__ for operation in graph.operations]


def test_nothing_to_do():
    plan = StagePlan(Layout(2), 2, (0, 1, 2, 3))
    assert not decompose(ACTOR_TRAINING, plan, plan).operations
    assert not decompose(ACTOR_TRAINING, plan, StagePlan(Layout(2), 2, (2, 3, 0, 1), micro_batches=4)).operations


def test_default_order_and_the_last_replica():
    # tp 2 on 0, 1 to tp 2 pp 2 elsewhere: nothing is retained, so one replica lives until it is copied.
    graph = decompose(
        ACTOR_TRAINING, StagePlan(Layout(2, 1), 2, (0, 1, 2, 3)), StagePlan(Layout(2, 2), 1, (4, 5, 6, 7))
    )
    assert kinds(graph) == ["Destroy", "Extend", "Extend", "Merge", "Destroy"]
    assert {(e.before, e.after) for e in graph.edges} == {(1, 3), (2, 3), (1, 4), (2, 4)}
    # Devices for which others wait are given up first.
    plans = StagePlan(Layout(), 2, (0, 1)), StagePlan(Layout(), 1, (2,))
    assert decompose(ACTOR_TRAINING, *plans).operations[-1] == Destroy(unit(1, 1, (0,)))
    contested = decompose(ACTOR_TRAINING, *plans, contested=frozenset({0}))
    assert contested.operations[-1] == Destroy(unit(1, 1, (1,)))


def test_sources_take_turns():
    graph = decompose(ACTOR_TRAINING, StagePlan(Layout(), 2, (0, 4)), StagePlan(Layout(), 6, (0, 1, 2, 4, 5, 6)))
    sources = [operation.source.devices[0] for operation in graph.operations if isinstance(operation, Extend)]
    assert sorted(sources) == [0, 0, 4, 4]


def test_a_copied_replica_is_merged_only_after_its_copies():
    # 0 is retained, the source of the copy to 1, and then merged with it.
    graph = decompose(ACTOR_TRAINING, StagePlan(Layout(), 1, (0,)), StagePlan(Layout(2), 1, (0, 1)))
    assert kinds(graph) == ["Extend", "Merge"]
    assert [(e.before, e.after) for e in graph.edges] == [(0, 1)]
