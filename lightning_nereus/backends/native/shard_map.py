"""The shard map of a real model: names and shapes from its modules, cuts from its own TP plan (design §5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.job import Head, ModelShape
from lightning_nereus.transition.shards import BOTH, FIRST, LAST, ParamSpec, ShardMap, TensorCut

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SCORE_HEAD = "score.weight"

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
_LAYER = re.compile(r"layers\.(\d+)\.")


def decoder_on_meta(config: PretrainedConfig) -> nn.Module:
    """The decoder of a configuration (embedding, layers, norm; no head), without memory."""
    with torch.device("meta"):
        return AutoModel.from_config(config)


def styles(config: PretrainedConfig) -> Mapping[str, str]:
    """Parallel style by module pattern (``layers.*.mlp.up_proj``), as the model class states it.

    Raises:
        ConfigurationError: if the model has no plan, or one with a style that is not supported.
    """
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"model {config.model_type!r}",
            "carries no tensor-parallel plan",
            "Use a transformers model whose configuration has base_model_tp_plan",
        )
    for pattern, style in plan.items():
        if style not in (COLUMN, ROW, PARTIAL):
            raise ConfigurationError(
                f"model {config.model_type!r}",
                f"plans {pattern} as {style!r}, which the native backend does not cut",
                f"Use a model whose plan has {COLUMN}, {ROW} and {PARTIAL} only (Llama, Qwen, Mistral, Gemma...)",
            )
    return plan


def style_of(module_name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a module inside the decoder, e.g. of ``layers.3.mlp.up_proj``."""
    return plan.get(_LAYER.sub("layers.*.", module_name))


def shard_map_of_model(config: PretrainedConfig, head: Head) -> ShardMap:
    """Read the shard map of any decoder-only model that carries a TP plan.

    Raises:
        ConfigurationError: if the model has no plan that the native backend can carry out.
    """
    plan, shape = styles(config), ModelShape.from_config(config.to_dict(), head)
    decoder = decoder_on_meta(config)
    vocabulary = TensorCut(0, shape.vocab)
    params = [ParamSpec(EMBEDDING, (shape.vocab, shape.hidden), BOTH if shape.tied else FIRST, vocabulary)]
    params.extend(_decoder_params(decoder, plan, shape))
    if head is Head.SCORE:
        params.append(ParamSpec(SCORE_HEAD, (1, shape.hidden), LAST))
    elif not shape.tied:
        params.append(ParamSpec(LM_HEAD, (shape.vocab, shape.hidden), LAST, vocabulary))
    return ShardMap(tuple(params), shape.layers, shape.heads)


def _decoder_params(decoder: nn.Module, plan: Mapping[str, str], shape: ModelShape) -> Iterator[ParamSpec]:
    for name, parameter in decoder.named_parameters():
        if name == "embed_tokens.weight":
            continue
        layer = _LAYER.match(name)
        owner: int | str = int(layer.group(1)) if layer else LAST
        module_name, _, kind = name.rpartition(".")
        style = style_of(module_name, plan)
        cut = _cut(module_name, kind, tuple(parameter.shape), style, shape)
        yield ParamSpec(f"model.{name}", tuple(parameter.shape), owner, cut, partial_gradient=style == PARTIAL)


def _cut(module: str, kind: str, size: tuple[int, ...], style: str | None, shape: ModelShape) -> TensorCut | None:
    if style not in (COLUMN, ROW) or (style == ROW and kind == "bias"):
        return None
    dim = 0 if style == COLUMN else 1
    if "attn" not in module:
        return TensorCut(dim, size[dim])
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if module.endswith(("k_proj", "v_proj")):
        expected, group = key_value, shape.heads // shape.kv_heads
    else:
        expected, group = query, 1
    if size[dim] != expected:
        raise ConfigurationError(
            f"model parameter {module}.{kind}",
            f"has {size[dim]} rows where {expected} were expected from its heads",
            "Use a model with separate query, key and value projections",
        )
    return TensorCut(dim, shape.heads, group, shape.head_dim)
