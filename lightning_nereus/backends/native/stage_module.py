"""StageModule: one position of a unit as an nn.Module over Hugging Face's own decoder layers.

The decoder is built from the model's configuration cut to the layers of this pipeline stage, so that
rotary embeddings, masks and layer types are the model's own; its parameters are this position's
shards, and its parallel modules are found by the model's TP plan.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from lightning_nereus.backends.native.shard_map import (
    COLUMN,
    EMBEDDING,
    LM_HEAD,
    ROW,
    SCORE_HEAD,
    decoder_on_meta,
    style_of,
    styles,
)
from lightning_nereus.backends.native.tensor_parallel import (
    KeepDouble,
    KeyValueHeads,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    copy_to_group,
)
from lightning_nereus.job import Head, Layout, Recompute
from lightning_nereus.transition.shards import ShardMap

LOG_PROBS, VALUES, SCORES = "log_probs", "values", "scores"


@dataclass(frozen=True, slots=True)
class Request:
    """What the last stage gives for rows of which the first ``prompt_width`` columns are the prompt."""

    kind: str
    prompt_width: int
    temperature: float = 1.0


class StageModule(nn.Module):
    """The layers of one pipeline stage on one tensor rank.

    Args:
        config: of the whole model.
        shard_map: of the whole model; ``layout`` and ``position`` say which part this is.
        tensors: the shards of the position, by global name; they become the parameters.
        tp_group: the tensor ranks of this pipeline stage, None for one.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        head: Head,
        shard_map: ShardMap,
        layout: Layout,
        position: int,
        tensors: Mapping[str, Tensor],
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        pipeline_rank, self.tensor_rank = layout.ranks(position)
        self.is_first, self.is_last = pipeline_rank == 0, pipeline_rank == layout.pp - 1
        self.layout, self.shard_map, self.tp_group = layout, shard_map, tp_group
        self.start, stop = shard_map.layer_range(layout.pp, pipeline_rank)
        self.config = _stage_config(config, self.start, stop, self.is_first)
        self.named: dict[str, nn.Parameter] = {n: nn.Parameter(t) for n, t in tensors.items()}
        self.keeps_double = next(iter(self.named.values())).dtype is torch.float64
        self.request = Request(LOG_PROBS, 1)
        self.decoder: Any = self._decoder(config)
        self.head = self._vocabulary_head(config) if self.is_last and head is Head.LM else None
        self.eval()

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size  # type: ignore[attr-defined]

    def _decoder(self, config: PretrainedConfig) -> nn.Module:
        decoder: Any = decoder_on_meta(self.config)
        _fill_buffers(decoder)
        scale = getattr(decoder.embed_tokens, "embed_scale", None)
        decoder.embed_tokens = nn.Identity()
        if self.is_first:
            start, _ = self._rows(EMBEDDING)
            decoder.embed_tokens = VocabParallelEmbedding(self.named[EMBEDDING], start, scale, self.tp_group)
        if not self.is_last:
            decoder.norm = nn.Identity()
        for name, module in list(decoder.named_modules()):
            for kind, _ in list(module.named_parameters(recurse=False)):
                local = self._global_name(f"{name}.{kind}")
                if local in self.named:
                    setattr(module, kind, self.named[local])
        self._parallelise(decoder, styles(config))
        return decoder

    def _global_name(self, name: str) -> str:
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) + self.start)
        return ".".join(["model", *parts])

    def _rows(self, name: str) -> tuple[int, int]:
        cut = self.shard_map[name].cut
        assert cut is not None
        return cut.range(self.layout.tp, self.tensor_rank)

    def _parallelise(self, decoder: nn.Module, plan: Mapping[str, str]) -> None:
        """Give row-parallel modules their sum and the parents of column-parallel ones their copy."""
        if self.layout.tp == 1:
            return
        parents: dict[str, nn.Module] = {}
        for name, module in list(decoder.named_modules()):
            style, (parent_name, _, own) = style_of(name, plan), name.rpartition(".")
            if style == ROW:
                assert isinstance(module, nn.Linear)
                row = RowParallelLinear(module.weight, module.bias, self.tp_group)  # type: ignore[arg-type]
                setattr(decoder.get_submodule(parent_name), own, row)
            elif style == COLUMN:
                parents[parent_name] = decoder.get_submodule(parent_name)
        for parent in parents.values():
            parent.register_forward_pre_hook(self._copy_input, with_kwargs=True)
            if hasattr(parent, "num_key_value_groups"):
                self._share_heads(parent)

    def _copy_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (copy_to_group(args[0], self.tp_group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_group(kwargs["hidden_states"], self.tp_group)}

    def _share_heads(self, attention: Any) -> None:
        """Tell an attention module how many local query heads read each local kv head."""
        total, group = self.shard_map.heads, attention.num_key_value_groups
        first, stop = self.tensor_rank * total // self.layout.tp, (self.tensor_rank + 1) * total // self.layout.tp
        head_of_query = [query // group - first // group for query in range(first, stop)]
        kv_heads, queries = head_of_query[-1] + 1, stop - first
        if queries % kv_heads == 0 and head_of_query == [q // (queries // kv_heads) for q in range(queries)]:
            attention.num_key_value_groups = queries // kv_heads
            return
        attention.num_key_value_groups = 1
        for name in ("k_proj", "v_proj"):
            projection = KeyValueHeads(getattr(attention, name), head_of_query, attention.head_dim)
            setattr(attention, name, projection)

    def _vocabulary_head(self, config: Any) -> VocabParallelHead:
        name = LM_HEAD if LM_HEAD in self.shard_map else EMBEDDING
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        vocabulary = self.shard_map[name].shape[0]
        return VocabParallelHead(self.named[name], self._rows(name)[0], vocabulary, self.tp_group, scale, softcap)

    # Running

    def _precision(self) -> AbstractContextManager[Any]:
        return KeepDouble() if self.keeps_double else nullcontext()

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose whether layers are computed again in the backward pass."""
        layers = recompute is Recompute.LAYER
        again = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), self._precision()))
        for layer in self.decoder.layers:
            layer.gradient_checkpointing = layers
            layer._gradient_checkpointing_func = again
            layer.training = layers

    def hidden(self, first: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Hidden states [n, t, hidden] after this stage's layers; the last stage's are normalised.

        ``first`` are token ids [n, t] on the first stage and the previous stage's output on others;
        ``attention_mask`` covers cached positions too.
        """
        with self._precision():
            inputs = self.decoder.embed_tokens(first) if self.is_first else first
            arguments = {"cache": cache, "use_cache": True} if cache is not None else {"use_cache": False}
            return self.decoder(
                inputs_embeds=inputs, attention_mask=attention_mask, position_ids=position_ids, **arguments
            ).last_hidden_state

    def forward(self, first: Tensor, *, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """This stage's part of a scoring or training pass.

        Returns:
            Hidden states [n, T, hidden], or on the last stage what the request asks for: log-probs and
            entropies [n, R, 2], values [n, R], scores [n], of the R = T - prompt_width response tokens.
        """
        hidden = self.hidden(first, attention_mask, position_ids)
        return self.output(hidden, input_ids, attention_mask) if self.is_last else hidden

    def output(self, hidden: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        width, request = self.request.prompt_width, self.request
        if request.kind == LOG_PROBS:
            assert self.head is not None
            before, targets = hidden[:, width - 1 : -1], input_ids[:, width:]
            return torch.stack(self.head.token_log_probs(before, targets, request.temperature), dim=-1)
        weight = self.named[SCORE_HEAD]
        if request.kind == VALUES:
            return (hidden[:, width - 1 : -1] @ weight.T).squeeze(-1)
        columns = torch.arange(attention_mask.shape[1], device=hidden.device)
        last = (columns * attention_mask).argmax(dim=-1)
        return (hidden[torch.arange(len(hidden)), last] @ weight.T).squeeze(-1)

    def output_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """What :meth:`forward` returns for ``rows`` rows of ``width`` tokens."""
        if not self.is_last:
            return rows, width, self.hidden_size
        responses = width - self.request.prompt_width
        return {LOG_PROBS: (rows, responses, 2), VALUES: (rows, responses), SCORES: (rows,)}[self.request.kind]


def _stage_config(config: PretrainedConfig, start: int, stop: int, is_first: bool) -> Any:
    """The configuration of layers ``[start, stop)`` as a model of their own."""
    stage: Any = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        stage.layer_types = config.layer_types[start:stop]  # type: ignore[attr-defined]
    stage.num_hidden_layers = stop - start
    if not is_first and getattr(config, "embedding_multiplier", None):
        stage.embedding_multiplier = 1.0  # it belongs to the embedding, which the first stage has
    return stage


def _fill_buffers(decoder: Any) -> None:
    """Give buffers (rotary frequencies, embedding scales) their values; only parameters stay without memory."""
    for module in decoder.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if buffers:
            decoder._init_weights(module)
