"""The map of a shape has the names and the shapes of the real model, and its elements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.job import Head, Layout, ModelShape
from lightning_nereus.transition import shard_map_of
from lightning_nereus.transition.shards import BOTH, FIRST, LAST

shapes = st.builds(
    lambda kv, group, **rest: ModelShape(heads=kv * group, kv_heads=kv, **rest),
    kv=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 9),
    intermediate=st.integers(1, 20),
    head_dim=st.integers(1, 4),
    vocab=st.integers(1, 40),
    tied=st.booleans(),
    qk_norm=st.booleans(),
    attention_bias=st.booleans(),
    norms_per_layer=st.sampled_from([2, 4]),
)


@given(shapes)
def test_elements_are_the_shape_s_parameters(shape):
    assert sum(spec.elements for spec in shard_map_of(shape).params) == shape.parameters


def configurations():
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "pad_token_id": 0,
    }
    for tied in (True, False):
        yield transformers.LlamaConfig(**common, tie_word_embeddings=tied)
        yield transformers.Qwen3Config(**common, tie_word_embeddings=tied)
        yield transformers.MistralConfig(**common, tie_word_embeddings=tied)
        yield transformers.Qwen2Config(**common, tie_word_embeddings=tied)
        yield transformers.Gemma2Config(**common, tie_word_embeddings=tied)


@pytest.mark.parametrize("head", list(Head))
def test_names_and_shapes_of_real_models(head):
    torch = pytest.importorskip("torch")
    import transformers

    for config in configurations():
        config.num_labels = 1
        auto = {Head.LM: "AutoModelForCausalLM", Head.SCORE: "AutoModelForSequenceClassification"}[head]
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config)
        real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shape = ModelShape.from_config(config.to_dict(), head)
        shard_map = shard_map_of(shape)
        assert {name: spec.shape for name, spec in shard_map.items()} == real, config.model_type
        embedding = shard_map["model.embed_tokens.weight"]
        assert embedding.owner == (BOTH if shape.tied else FIRST)


def test_cuts_and_owners():
    shape = ModelShape(
        layers=3,
        hidden=6,
        intermediate=13,
        heads=8,
        kv_heads=2,
        head_dim=2,
        vocab=19,
        qk_norm=True,
        attention_bias=True,
    )
    shard_map = shard_map_of(shape)
    layout = Layout(4, 2)

    def rows(name, dim, position):
        piece = shard_map.slice(name, layout, position)
        return piece and piece.ranges[dim]

    layer = "model.layers.0."
    assert [rows(layer + "self_attn.q_proj.weight", 0, t) for t in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    # Two kv heads for four tensor ranks: each is held twice.
    for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_proj.bias"):
        assert [rows(layer + name, 0, t) for t in range(4)] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert [rows(layer + "self_attn.o_proj.weight", 1, t) for t in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert [rows(layer + "mlp.down_proj.weight", 1, t) for t in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 13)]
    assert [rows("lm_head.weight", 0, t) for t in range(8)] == [None] * 4 + [(0, 4), (4, 9), (9, 14), (14, 19)]
    assert rows("model.embed_tokens.weight", 0, 4) is None
    assert rows(layer + "self_attn.q_norm.weight", 0, 3) == (0, 2)
    partial = {name.split(".")[-2] for name, spec in shard_map.items() if spec.partial_gradient}
    assert partial == {"q_norm", "k_norm"}
    assert shard_map["model.norm.weight"].owner == LAST
    assert shard_map_of(ModelShape(1, 6, 6, 1, 1, 6, 9, head=Head.SCORE))["score.weight"].shape == (1, 6)
