"""NativeExecutor: scoring, training and generation of one unit, under any (tp, pp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import DynamicCache

from lightning_nereus.backends.native.stage_module import LOG_PROBS, Request, StageModule
from lightning_nereus.backends.sampling import Sampling, draw, uniforms
from lightning_nereus.job import Layout, Recompute
from lightning_nereus.transition.shards import ShardMap, Slice

Rows = Mapping[str, Any]
Objective = Callable[[Mapping[str, Tensor], Rows], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class GeneratedRows:
    """Responses [n, max_new_tokens]; the mask is False after a row's end; log-probs are 0 there."""

    response_ids: Tensor
    response_mask: Tensor
    log_probs: Tensor


@dataclass(frozen=True, slots=True)
class UnitGroups:
    """The groups over which one position computes; each None where it has one member.

    ``tied`` joins the first and the last pipeline stage, which hold a tied embedding both.
    """

    unit: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    tied: dist.ProcessGroup | None = None


class NativeExecutor:
    """What the runtime asks of one position of one unit.

    Every method is called by all positions of the unit at the same time. Rows are a dictionary with
    ``input_ids`` and ``attention_mask`` [n, T] and ``prompt_width``; further tensors [n, ...] are
    handed to the objective.
    """

    def __init__(
        self, module: StageModule, shard_map: ShardMap, layout: Layout, position: int, groups: UnitGroups
    ) -> None:
        self.module = module
        self.shard_map = shard_map
        self.layout = layout
        self.position = position
        self.pipeline_rank, self.tensor_rank = layout.ranks(position)
        self.groups = groups

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.module.named

    # Forward and backward

    def score(self, rows: Rows, kind: str, micro_batches: int, temperature: float = 1.0) -> dict[str, Tensor]:
        """Log-probs and entropies, values or scores of all rows, on every position. No gradient."""
        self.module.request = Request(kind, rows["prompt_width"], temperature)
        with torch.no_grad():
            output = self._run(rows, micro_batches, None)
            assert output is not None or not self.module.is_last
            total, width = rows["input_ids"].shape
            output = self._from_last(output, total, width)
        return _named(kind, output)

    def forward_backward(
        self, rows: Rows, objective: Objective, kind: str, micro_batches: int, recompute: Recompute, temperature: float
    ) -> dict[str, Tensor]:
        """Accumulate gradients of the objective over all rows and return its summed statistics, everywhere."""
        self.module.request = Request(kind, rows["prompt_width"], temperature)
        self.module.set_recompute(recompute)
        totals: dict[str, Tensor] = {}

        def loss_of(output: Tensor, index: Tensor) -> Tensor:
            part = {k: v[index] if isinstance(v, Tensor) else v for k, v in rows.items()}
            loss, statistics = objective(_named(kind, output), part)
            for name, value in {"loss": loss, **statistics}.items():
                totals[name] = totals.get(name, 0) + value.detach().double()
            return loss

        try:
            self._run(rows, micro_batches, loss_of)
        finally:
            self.module.set_recompute(Recompute.NONE)
        return self._statistics(totals)

    def _run(self, rows: Rows, micro_batches: int, loss_of: Any) -> Tensor | None:
        ids, mask = rows["input_ids"], rows["attention_mask"]
        extra = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
        index = torch.arange(len(ids))
        if self.layout.pp > 1:
            return self._run_pipeline(ids, extra, index, micro_batches, loss_of)
        outputs = []
        for part in index.chunk(micro_batches):
            output = self.module(ids[part], **{k: v[part] for k, v in extra.items()})
            if loss_of is not None:
                loss_of(output, part).backward()
            outputs.append(output.detach())
        return torch.cat(outputs)

    def _run_pipeline(
        self, ids: Tensor, extra: dict[str, Tensor], index: Tensor, micro_batches: int, loss_of: Any
    ) -> Tensor | None:
        """A fresh stage and schedule: they accept one shape only, the modules any."""
        module, size, width = self.module, len(ids) // micro_batches, ids.shape[1]
        dtype = next(iter(self.parameters.values())).dtype
        backward = loss_of is not None
        hidden = torch.empty(size, width, module.hidden_size, dtype=dtype, device="meta", requires_grad=backward)
        shape = module.output_shape(size, width)
        stage = PipelineStage(
            module,
            self.pipeline_rank,
            self.layout.pp,
            torch.device("cpu"),
            input_args=torch.empty(size, width, dtype=torch.int64, device="meta") if module.is_first else hidden,
            output_args=torch.empty(shape, dtype=dtype, device="meta", requires_grad=backward),
            group=self.groups.pp,
        )
        schedule_type = Schedule1F1B if micro_batches >= self.layout.pp else ScheduleGPipe
        schedule: Any = schedule_type(stage, micro_batches, loss_fn=loss_of, scale_grads=False)
        arguments = (ids,) if module.is_first else ()
        target = index if module.is_last and loss_of is not None else None
        losses: list[Tensor] | None = [] if target is not None else None
        if loss_of is None:
            return schedule.eval(*arguments, **extra)
        return schedule.step(*arguments, target=target, losses=losses, **extra)

    def _from_last(self, output: Tensor | None, rows: int, width: int) -> Tensor:
        """Hand the last stage's output to every pipeline stage."""
        if self.groups.pp is None:
            assert output is not None
            return output
        if output is None:
            size = (*self._last_shape(rows, width),)
            output = torch.empty(size, dtype=next(iter(self.parameters.values())).dtype)
        output = output.contiguous()
        dist.broadcast(output, group=self.groups.pp, group_src=self.layout.pp - 1)
        return output

    def _last_shape(self, rows: int, width: int) -> tuple[int, ...]:
        responses = width - self.module.request.prompt_width
        return {"log_probs": (rows, responses, 2), "values": (rows, responses), "scores": (rows,)}[
            self.module.request.kind
        ]

    def _statistics(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.groups.pp is None:
            return totals
        box = [totals if self.module.is_last else None]
        dist.broadcast_object_list(box, group=self.groups.pp, group_src=self.layout.pp - 1)
        assert box[0] is not None
        return box[0]

    # Gradients

    def reduce_gradients(self, dp_group: dist.ProcessGroup | None) -> None:
        """Complete every gradient: parts of tensor ranks, both ends of a tied embedding, all replicas."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            spec = self.shard_map[name]
            if self.groups.tp is not None and spec.partial_gradient:
                dist.all_reduce(parameter.grad, group=self.groups.tp)
            elif self.groups.tp is not None and spec.cut is not None and spec.cut.overlaps(self.layout.tp):
                self._sum_overlaps(name, parameter)
            if self.groups.tied is not None and spec.owner == "first+last":
                dist.all_reduce(parameter.grad, group=self.groups.tied)
        if dp_group is not None:
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat, group=dp_group)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _sum_overlaps(self, name: str, parameter: nn.Parameter) -> None:
        """Kv heads that several tensor ranks hold: sum their gradients, so that the copies stay one."""
        assert parameter.grad is not None
        held = self._slice(name, self.position)
        whole = parameter.grad.new_zeros(self.shard_map[name].shape)
        box = tuple(slice(a, b) for a, b in held.ranges)
        whole[box] = parameter.grad
        dist.all_reduce(whole, group=self.groups.tp)
        parameter.grad.copy_(whole[box])

    def _slice(self, name: str, position: int) -> Slice:
        held = self.shard_map.slice(name, self.layout, position)
        assert held is not None
        return held

    def gradient_norm(self) -> Tensor:
        """The 2-norm over the whole model, each element counted once; float64, on every position."""
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                total += self._own_part(name, parameter.grad).double().square().sum()
        if self.groups.unit is not None:
            dist.all_reduce(total, group=self.groups.unit)
        return total.sqrt()

    def _own_part(self, name: str, gradient: Tensor) -> Tensor:
        """The elements that no earlier position of the unit holds."""
        spec = self.shard_map[name]
        if spec.owner == "first+last" and self.pipeline_rank > 0:
            return gradient[:0]
        if spec.cut is None:
            return gradient if self.tensor_rank == 0 else gradient[:0]
        if self.tensor_rank == 0:
            return gradient
        start, stop = spec.cut.range(self.layout.tp, self.tensor_rank)
        done = min(max(start, spec.cut.range(self.layout.tp, self.tensor_rank - 1)[1]), stop)
        return gradient.narrow(spec.cut.dim, done - start, stop - done)

    def clip_(self, max_norm: float) -> Tensor:
        """Scale gradients to ``max_norm`` at most (0 or less: leave them). Returns the norm before."""
        norm = self.gradient_norm()
        if max_norm > 0:
            scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return norm

    # Generation

    def generate(
        self, prompt_ids: Tensor, prompt_mask: Tensor, rows: Tensor, step: int, seed: int, sampling: Sampling
    ) -> GeneratedRows:
        """Sample a response to each left-padded prompt [n, P]; ``rows`` [n] number them in the global batch."""
        total = len(prompt_ids)
        dtype = next(iter(self.parameters.values())).dtype
        ids = torch.full((total, sampling.max_new_tokens), sampling.pad_token_id, dtype=torch.int64)
        valid = torch.zeros(total, sampling.max_new_tokens, dtype=torch.bool)
        log_probs = torch.zeros(total, sampling.max_new_tokens, dtype=dtype)
        alive = torch.ones(total, dtype=torch.bool)
        mask, place = prompt_mask.to(torch.int64), positions(prompt_mask)
        tokens, cache = prompt_ids, DynamicCache(config=self.module.config)
        with torch.no_grad():
            for position in range(sampling.max_new_tokens):
                hidden = self._advance(tokens, mask, place, cache)
                new, new_log_probs = self._next(hidden, sampling, uniforms(seed, step, rows, position))
                ids[:, position] = torch.where(alive, new, sampling.pad_token_id)
                log_probs[:, position] = new_log_probs * alive
                valid[:, position] = alive
                alive = alive & (new != sampling.eos_token_id)
                if not alive.any():
                    break
                tokens = ids[:, position : position + 1]
                mask = torch.cat([mask, torch.ones(total, 1, dtype=mask.dtype)], dim=1)
                place = place[:, -1:] + 1
        return GeneratedRows(ids, valid, log_probs)

    def _advance(self, tokens: Tensor, mask: Tensor, place: Tensor, cache: DynamicCache) -> Tensor | None:
        """One pass through the pipeline: the hidden state [n, hidden] of the last token, on the last stage."""
        module, group = self.module, self.groups.pp
        first = tokens
        if not module.is_first:
            dtype = next(iter(self.parameters.values())).dtype
            first = torch.empty(*tokens.shape, module.hidden_size, dtype=dtype)
            dist.recv(first, group=group, group_src=self.pipeline_rank - 1)
        hidden = module.hidden(first, mask, place, cache)
        if module.is_last:
            return hidden[:, -1]
        dist.send(hidden.contiguous(), group=group, group_dst=self.pipeline_rank + 1)
        return None

    def _next(self, hidden: Tensor | None, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row and its log-prob, decided on the last stage and told to the others."""
        if hidden is not None:
            assert self.module.head is not None
            tokens, log_probs = draw(self.module.head.logits(hidden), sampling, uniform)
        else:
            tokens = torch.empty(len(uniform), dtype=torch.int64)
            log_probs = torch.empty(len(uniform), dtype=next(iter(self.parameters.values())).dtype)
        if self.groups.pp is not None:
            dist.broadcast(tokens, group=self.groups.pp, group_src=self.layout.pp - 1)
            dist.broadcast(log_probs, group=self.groups.pp, group_src=self.layout.pp - 1)
        return tokens, log_probs


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its row, counted from its first real token."""
    return (mask.to(torch.int64).cumsum(dim=-1) - 1).clamp_(min=0)


def _named(kind: str, output: Tensor) -> dict[str, Tensor]:
    if kind == LOG_PROBS:
        return {"log_probs": output[..., 0], "entropy": output[..., 1]}
    return {kind: output}
