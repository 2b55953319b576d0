"""The shard map of a ModelShape, for simulation and planning without a real model (design §5).

Names are those of Hugging Face's decoder-only models. ``backends/native`` builds the map of a real
model; a test proves that both agree.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_nereus.job import Head, ModelShape
from lightning_nereus.transition.shards import BOTH, FIRST, LAST, ParamSpec, ShardMap, TensorCut

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def shard_map_of(shape: ModelShape) -> ShardMap:
    """The shard map of a model of this shape; its elements add up to ``shape.parameters``."""
    vocabulary = TensorCut(0, shape.vocab)
    owner = BOTH if shape.tied else FIRST
    params = [ParamSpec("model.embed_tokens.weight", (shape.vocab, shape.hidden), owner, vocabulary)]
    for layer in range(shape.layers):
        params.extend(_layer(shape, layer))
    params.append(ParamSpec("model.norm.weight", (shape.hidden,), LAST))
    if shape.head is Head.SCORE:
        params.append(ParamSpec("score.weight", (1, shape.hidden), LAST))
    elif not shape.tied:
        params.append(ParamSpec("lm_head.weight", (shape.vocab, shape.hidden), LAST, vocabulary))
    return ShardMap(tuple(params), shape.layers, shape.heads)


def _layer(shape: ModelShape, layer: int) -> Iterator[ParamSpec]:
    prefix = f"model.layers.{layer}"
    hidden, head_dim, heads = shape.hidden, shape.head_dim, shape.heads
    query = TensorCut(0, heads, 1, head_dim)
    # Cut by query heads, so that a tensor rank holds every kv head that one of its query heads reads.
    key_value = TensorCut(0, heads, heads // shape.kv_heads, head_dim)
    for name, count, cut in (("q", heads, query), ("k", shape.kv_heads, key_value), ("v", shape.kv_heads, key_value)):
        yield ParamSpec(f"{prefix}.self_attn.{name}_proj.weight", (count * head_dim, hidden), layer, cut)
        if shape.attention_bias:
            yield ParamSpec(f"{prefix}.self_attn.{name}_proj.bias", (count * head_dim,), layer, cut)
    output = TensorCut(1, heads, 1, head_dim)
    yield ParamSpec(f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head_dim), layer, output)
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ParamSpec(f"{prefix}.self_attn.{name}.weight", (head_dim,), layer, partial_gradient=True)
    column, row = TensorCut(0, shape.intermediate), TensorCut(1, shape.intermediate)
    yield ParamSpec(f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, hidden), layer, column)
    yield ParamSpec(f"{prefix}.mlp.up_proj.weight", (shape.intermediate, hidden), layer, column)
    yield ParamSpec(f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate), layer, row)
    for name in _FOUR_NORMS if shape.norms_per_layer == 4 else _TWO_NORMS:
        yield ParamSpec(f"{prefix}.{name}.weight", (hidden,), layer)
