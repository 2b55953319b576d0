import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.cost import CostModel
from lightning_nereus.cost.memory import LOGIT_COPIES, LOGIT_ELEMENTS, layer_counts, shard_elements, stage_memory
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    Head,
    Layout,
    ModelShape,
    Plan,
    Recompute,
    StagePlan,
)
from lightning_nereus.transition import shard_map_of
from tests.cost.jobs import ACTOR, GRPO, PPO, cluster, workload

ODD = ModelShape(
    layers=9, hidden=6, intermediate=13, heads=8, kv_heads=2, head_dim=2, vocab=19, tied=True, qk_norm=True
)
SCORED = ModelShape(
    layers=5,
    hidden=8,
    intermediate=12,
    heads=4,
    kv_heads=4,
    head_dim=2,
    vocab=17,
    head=Head.SCORE,
    attention_bias=True,
    norms_per_layer=4,
)


@pytest.mark.parametrize("shape", [ACTOR, ODD, SCORED])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_shard_elements_are_those_of_the_fullest_position_of_the_shard_map(shape, tp, pp):
    if shape.heads % tp or pp > shape.layers:
        pytest.skip("the model cannot take the layout")
    layout, shard_map = Layout(tp, pp), shard_map_of(shape)
    counted = max(shard_map.elements(layout, position) for position in range(layout.size))
    assert shard_elements(shape, layout) == counted
    assert sum(layer_counts(shape, pp)) == shape.layers


def one(dp=1, tp=1, pp=1, **more):
    return StagePlan(Layout(tp, pp), dp, tuple(range(dp * tp * pp)), **more)


def test_kv_cache_at_the_longest_length():
    load = workload(448.0, rows=64)
    memory = stage_memory(GRPO, ACTOR_GENERATION, one(), load)
    assert memory.resident == ACTOR.parameters * 4
    cache = 64 * 512 * 2 * ACTOR.kv_heads * ACTOR.head_dim * ACTOR.layers * 4
    logits = LOGIT_COPIES * 64 * ACTOR.vocab * 4
    prefill_at_most = 64 * 64 * (8 * ACTOR.hidden + 3 * 512 + 4 * 256 + 4 * 1536) * 4
    assert memory.transient == cache + max(logits, prefill_at_most)


def test_trained_state_is_parameters_gradients_and_optimizer():
    memory = stage_memory(GRPO, ACTOR_TRAINING, one(), workload())
    assert memory.resident == ACTOR.parameters * (4 + 4 + 8)


def test_logits_are_chunked_and_scores_have_none():
    short = stage_memory(PPO, REFERENCE_INFERENCE, one(), workload(rows=64))
    assert short.transient > LOGIT_COPIES * (LOGIT_ELEMENTS // ACTOR.vocab) * ACTOR.vocab * 4
    per_token = (6 * ACTOR.hidden + 3 * 512 + 4 * 256 + 4 * 1536 + 2 * ACTOR.hidden) * 4
    assert stage_memory(PPO, REWARD_INFERENCE, one(), workload(rows=64)).transient == 64 * 320 * per_token


def test_micro_batches_and_recompute_take_less():
    load = workload(2048.0)
    sizes = [
        stage_memory(GRPO, ACTOR_TRAINING, one(micro_batches=m, recompute=r), load).transient
        for m, r in ((1, Recompute.NONE), (4, Recompute.NONE), (4, Recompute.LAYER), (16, Recompute.LAYER))
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 3 * sizes[1]


def test_residents_add_up_and_the_largest_transient_counts():
    plan = Plan.uniform(GRPO.model_stages, one(dp=2))
    load = workload()
    shares = [stage_memory(GRPO, m, one(dp=2), load) for m in GRPO.model_stages]
    memory = CostModel(GRPO, cluster()).memory(plan, load)
    assert set(memory) == {0, 1}
    assert memory[0].resident == sum(s.resident for s in shares)
    assert memory[0].transient == max(s.transient for s in shares)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4]), st.floats(16, 4096))
def test_more_replicas_or_tensor_ranks_never_need_more_memory_a_device(tp, dp, length):
    load = workload(length)
    for model_stage in PPO.model_stages:
        few = stage_memory(PPO, model_stage, one(dp=dp, tp=tp), load)
        more = stage_memory(PPO, model_stage, one(dp=2 * dp, tp=tp), load)
        assert more.total <= few.total
        if tp < 8:
            assert stage_memory(PPO, model_stage, one(dp=dp, tp=2 * tp), load).total <= few.total


@given(st.floats(16, 4000), st.floats(1.0, 2.0))
def test_longer_rows_never_need_less(length, growth):
    for model_stage in PPO.model_stages:
        assert (
            stage_memory(PPO, model_stage, one(dp=2), workload(length)).total
            <= stage_memory(PPO, model_stage, one(dp=2), workload(length * growth)).total
        )


def test_violation_names_device_need_and_limit():
    plan = Plan.uniform(GRPO.model_stages, StagePlan(Layout(), 2, (2, 3)))
    model = CostModel(GRPO, cluster(memory_gib=1.0))
    text = model.memory_violation(plan, workload(4096.0))
    assert text is not None
    assert text.startswith("device 2 needs ")
    assert "90% of 1.00 GiB is 921.60 MiB" in text
    assert not model.fits(plan, workload(4096.0))
    assert CostModel(GRPO, cluster(memory_gib=1000.0)).fits(plan, workload(4096.0))
