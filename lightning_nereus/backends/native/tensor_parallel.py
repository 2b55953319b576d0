"""Tensor parallelism over plain local tensors: an autograd pair and the modules that use it.

Each module holds its rank's rows or columns as ordinary parameters, so that clipping, foreach and
fused optimizers see nothing unusual. ``group`` is None where a unit has one tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

# Logits of one chunk of tokens: 2^22 elements are 32 MiB in double precision, whatever the vocabulary.
LOGIT_ELEMENTS = 2**22


class _CopyToGroup(torch.autograd.Function):
    """Identity forward; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromGroup(torch.autograd.Function):
    """Sum over the group forward; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def copy_to_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The input of column-parallel modules."""
    return x if group is None else _CopyToGroup.apply(x, group)  # type: ignore[return-value]


def reduce_from_group(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The output of row-parallel modules."""
    return x if group is None else _ReduceFromGroup.apply(x, group)  # type: ignore[return-value]


class RowParallelLinear(nn.Module):
    """Columns of a weight on each rank; the products are summed and the bias is added once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_from_group(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows ``[start, start + len(weight))`` of an embedding; other tokens give zeros, which the sum fills."""

    def __init__(self, weight: nn.Parameter, start: int, scale: Tensor | None, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight
        self.start = start
        self.scale = scale
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.clamp(0, max(len(self.weight) - 1, 0)), self.weight)
        x = reduce_from_group(rows * mine.unsqueeze(-1), self.group)
        return x if self.scale is None else x * self.scale.to(x.dtype)


class KeyValueHeads(nn.Module):
    """A key or value projection that repeats heads where query heads share them unevenly.

    A rank whose query heads begin or end inside a group has no whole number of query heads a kv head;
    then it gives one kv head to each query head.
    """

    def __init__(self, projection: nn.Module, head_of_query: list[int], head_dim: int) -> None:
        super().__init__()
        self.projection = projection
        self.head_of_query = head_of_query
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        heads = y.view(*y.shape[:-1], -1, self.head_dim)
        return heads[..., self.head_of_query, :].flatten(-2)


class VocabParallelHead:
    """Next-token logits, log-probs and entropies over a vocabulary of which each rank holds rows.

    Args:
        weight: [rows held here, hidden].
        start: the first row held here; ``vocabulary`` the number of all rows.
        scale: logits are multiplied by it; ``softcap`` c bounds them to ``c * tanh(logits / c)``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        start: int,
        vocabulary: int,
        group: dist.ProcessGroup | None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.weight = weight
        self.start = start
        self.vocabulary = vocabulary
        self.group = group
        self.scale = scale
        self.softcap = softcap

    def _local(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits [n, vocabulary] of hidden states [n, hidden], on every rank. No gradient."""
        local = self._local(hidden)
        if self.group is None:
            return local
        whole = local.new_zeros(len(hidden), self.vocabulary)
        whole[:, self.start : self.start + local.shape[-1]] = local
        dist.all_reduce(whole, group=self.group)
        return whole

    def token_log_probs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of ``targets`` and entropies, both shaped like ``targets``, in chunks over tokens.

        Each chunk's logits are computed again in the backward pass, so that memory is flat in the
        vocabulary times the length.
        """
        flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        size = max(1, LOGIT_ELEMENTS // self.vocabulary)
        parts = []
        for h, t in zip(flat.split(size), wanted.split(size), strict=True):
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._chunk, h, t, temperature, use_reentrant=False))
            else:
                parts.append(self._chunk(h, t, temperature))
        log_probs, entropy = (torch.cat(column).view(targets.shape) for column in zip(*parts, strict=True))
        return log_probs, entropy

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self._local(copy_to_group(hidden, self.group)) / temperature
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        peak = logits.detach().amax(dim=-1) if logits.shape[-1] else logits.new_full(targets.shape, -torch.inf)
        if self.group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        shifted = logits - peak.unsqueeze(-1)
        weights = shifted.exp()
        local = targets - self.start
        mine = (local >= 0) & (local < logits.shape[-1])
        picked = shifted.gather(-1, local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1), picked])
        normaliser, weighted, target = reduce_from_group(sums, self.group).unbind(0)
        log_normaliser = normaliser.log()
        return target - log_normaliser, log_normaliser - weighted / normaliser


class KeepDouble(TorchFunctionMode):
    """Keeps double precision where a model casts to single precision on purpose.

    Models normalise and take softmax in float32 whatever their dtype. In a float64 run those casts
    would turn differences of 1e-16 between two plans into 1e-7.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.float) and args[0].dtype is torch.float64:
            wanted = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            if func is Tensor.float or wanted is torch.float32:
                return args[0]
        softmax = func in (F.softmax, torch.softmax, Tensor.softmax) and kwargs.get("dtype") is torch.float32
        if softmax and args[0].dtype is torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
