"""The native backend under every layout against transformers' own model and against one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_nereus.backends.native.build import unit_collection
from lightning_nereus.backends.native.sources import ModelSource
from lightning_nereus.backends.sampling import Sampling
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import ACTOR_TRAINING, Head, Layout, Recompute, StagePlan
from lightning_nereus.runtime.communicators import Communicators
from lightning_nereus.transition import shard_map_of
from tests.backends.models import CONFIGS, batch, reference_log_probs, whole_model
from tests.distributed.ranks import RankPool

LAYOUTS = [Layout(tp, pp) for tp, pp in itertools.product((1, 2, 4), (1, 2, 4)) if tp * pp <= 8]
# How far the response part of a row is real is what `batch` masks; outside it log-probs mean nothing.


def executor_of(name: str, head: Head, plan: StagePlan, rank: int, communicators: Communicators | None, dtype: Any):
    source = ModelSource(whole_model(CONFIGS[name], dtype=torch.float32), head, seed=5)
    collection = unit_collection(ACTOR_TRAINING, source, rank, communicators, dtype)
    collection.materialise(plan)
    return collection


def objective(outputs: Any, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
    values = outputs.get("log_probs", outputs.get("values"))
    mask = rows["attention_mask"][:, rows["prompt_width"] :]
    weights = torch.linspace(-1, 1, values.shape[1], dtype=values.dtype) * mask
    loss = (values * weights).sum()
    if "entropy" in outputs:
        loss = loss + 0.1 * (outputs["entropy"] * mask).sum()
    return loss, {"tokens": mask.sum()}


def outcome(rank: int, communicators: Communicators | None, name: str, head: Head, plan: StagePlan, dtype: Any) -> Any:
    """Scores, gradients' norm and updated parameters, and a generation of one plan; None outside it."""
    collection = executor_of(name, head, plan, rank, communicators, dtype)
    if collection.unit is None:
        return None
    executor, rows = collection.executor, batch(8)
    kind = "log_probs" if head is Head.LM else "values"
    score = executor.score(rows, kind, plan.micro_batches, 0.7)
    mine = collection.rows(8)
    local = {k: v[mine.start : mine.stop] if isinstance(v, Tensor) else v for k, v in rows.items()}
    statistics = executor.forward_backward(local, objective, kind, plan.micro_batches, plan.recompute, 0.7)
    executor.reduce_gradients(collection.dp_group)
    norm = executor.clip_(1.0)
    gradients = {n: p.grad.clone() for n, p in executor.parameters.items()}
    generated = None
    if head is Head.LM:
        sampling = Sampling(max_new_tokens=6, eos_token_id=1, pad_token_id=0, temperature=1.0)
        width = rows["prompt_width"]
        numbers = torch.arange(8)
        out = executor.generate(
            rows["input_ids"][:, :width], rows["attention_mask"][:, :width], numbers, 3, 11, sampling
        )
        generated = (out.response_ids, out.response_mask, out.log_probs)
    slices = collection.shard_map.shard(plan.layout, collection.position)
    return score[kind], {k: float(v) for k, v in statistics.items()}, float(norm), gradients, slices, generated


def run(ranks: RankPool, *args: Any) -> list[Any]:
    return [result for result in ranks.run(outcome, *args) if result is not None]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_log_probs_equal_transformers(name: str):
    rows = batch(8)
    model = whole_model(CONFIGS[name], dtype=torch.float32)
    executor = executor_of(name, Head.LM, StagePlan(Layout(), 1, (0,)), 0, None, torch.float32).executor
    mask = rows["attention_mask"][:, 5:]
    with torch.no_grad():
        expected = reference_log_probs(model, rows, 0.7)
    got = executor.score(rows, "log_probs", 2, 0.7)["log_probs"]
    assert torch.allclose(got[mask].double(), expected[mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "mistral_one_kv_head", "qwen2_bias"])
def test_both_shard_maps_agree(name: str):
    for head in Head:
        source = ModelSource(CONFIGS[name], head)
        real, planned = source.shard_map(), shard_map_of(source.shape)
        assert {n: (s.shape, s.owner, s.cut, s.partial_gradient) for n, s in real.items()} == {
            n: (s.shape, s.owner, s.cut, s.partial_gradient) for n, s in planned.items()
        }


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("head", list(Head))
def test_every_layout_equals_one_device(ranks: RankPool, name: str, head: Head):
    torch.manual_seed(0)
    one = StagePlan(Layout(), 1, (0,))
    score, statistics, norm, gradients, _, generated = outcome(0, None, name, head, one, torch.float64)
    mask = batch(8)["attention_mask"][:, 5:]
    for index, layout in enumerate(LAYOUTS):
        dp = 2 if layout.size <= 4 and index % 2 else 1
        plan = StagePlan(
            layout,
            dp,
            tuple(range(dp * layout.size)),
            micro_batches=(4 if dp == 1 else 2) if layout.pp > 1 else 2,
            recompute=list(Recompute)[index % 2],
        )
        total: dict[str, float] = {}
        for position, result in enumerate(run(ranks, name, head, plan, torch.float64)):
            assert torch.allclose(result[0][mask], score[mask], atol=1e-10, rtol=1e-10), (plan, "scores")
            assert result[2] == pytest.approx(norm, rel=1e-10), (plan, "gradient norm")
            for parameter, box in result[4].items():
                expected = gradients[parameter][tuple(slice(a, b) for a, b in box.ranges)]
                assert torch.allclose(result[3][parameter], expected, atol=1e-10, rtol=1e-9), (plan, parameter)
            if position % layout.size == 0:
                total = {k: total.get(k, 0.0) + v for k, v in result[1].items()}
            if generated is not None:
                assert torch.equal(result[5][0], generated[0]), (plan, "tokens")
                assert torch.equal(result[5][1], generated[1]), (plan, "mask")
                assert torch.allclose(result[5][2], generated[2], atol=1e-10)
        assert total == pytest.approx(statistics, rel=1e-10), plan


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_generation_equals_transformers(name: str):
    rows = batch(4)
    width = rows["prompt_width"]
    ids, mask = rows["input_ids"][:, :width], rows["attention_mask"][:, :width]
    model = whole_model(CONFIGS[name], dtype=torch.float32)
    expected = model.generate(
        input_ids=ids, attention_mask=mask.long(), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=1
    )[:, width:]
    executor = executor_of(name, Head.LM, StagePlan(Layout(), 1, (0,)), 0, None, torch.float32).executor
    sampling = Sampling(8, eos_token_id=1, pad_token_id=0, temperature=0.0)
    out = executor.generate(ids, mask, torch.arange(4), 0, 0, sampling).response_ids
    assert torch.equal(out[:, : expected.shape[1]], expected)


def test_a_model_without_a_plan_is_refused():
    from transformers import GPT2Config

    config = GPT2Config(
        n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0
    )
    with pytest.raises(ConfigurationError, match="no tensor-parallel plan"):
        ModelSource(config, Head.LM).shard_map()


def test_dropout_is_refused():
    config = CONFIGS["llama"].to_dict()
    config["attention_dropout"] = 0.1
    with pytest.raises(ConfigurationError, match="attention_dropout"):
        ModelSource(type(CONFIGS["llama"]).from_dict(config), Head.LM)
