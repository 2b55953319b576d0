"""Handles: how a LightningModule asks its models for work, whatever plan is in force (design §9).

A call runs at once on the ranks that are in the model-stage and returns at once on all others, so
that stages on disjoint devices run at the same time. What it returns is a :class:`Future`;
``.result()`` is collective over the job and gives every rank the rows of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_nereus.backends.sampling import Sampling
from lightning_nereus.job import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    ModelStage,
    Role,
)
from lightning_nereus.rl.rollout import Rollout
from lightning_nereus.runtime.job import JobRuntime
from lightning_nereus.runtime.unit import UnitCollection

T = TypeVar("T")
Objective = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


class Future(Generic[T]):
    """The result of work that may still run on other ranks."""

    def __init__(self, collect: Callable[[], T]) -> None:
        self._collect: Callable[[], T] | None = collect
        self._value: T | None = None

    def result(self) -> T:
        """All rows, on every rank. Every rank must call it, in the same order of futures."""
        if self._collect is not None:
            self._value, self._collect = self._collect(), None
        return self._value  # type: ignore[return-value]


class ModelHandle:
    """What all roles have in common.

    Args:
        runtime: this rank's part of the job.
        role: whose handle this is.
        scoring: the model-stage whose units score rows.
    """

    def __init__(self, runtime: JobRuntime, role: Role, scoring: ModelStage) -> None:
        self.runtime = runtime
        self.role = role
        self.scoring = scoring

    @property
    def collection(self) -> UnitCollection:
        return self.runtime.collections[self.scoring]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank holds now; one empty placeholder outside the model-stage.

        Optimizers that are made of them follow the units through every later transition.
        """
        executor = self.collection.executor
        return list(executor.parameters.values()) if executor is not None else [self.collection.placeholder]

    def _score(self, rollout: Rollout, kind: str, temperature: float = 1.0) -> Future[dict[str, Tensor]]:
        collection, total = self.collection, len(rollout)
        mine = collection.rows(total)
        local = None
        if collection.unit is not None:
            with self.runtime.clock.measure(self.scoring):
                rows = rollout.select(torch.arange(mine.start, mine.stop)).model_rows()
                micro_batches = self.runtime.plan[self.scoring].micro_batches
                while len(mine) % micro_batches:
                    micro_batches -= 1
                local = collection.executor.score(rows, kind, micro_batches, temperature)
        return Future(lambda: self.runtime.share_rows(self.scoring, total, local))


class ScoringHandle(ModelHandle):
    """A frozen model: reference log-probs or reward scores."""

    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Future[dict[str, Tensor]]:
        """``log_probs`` and ``entropy``, each [rows, responses], of the response tokens."""
        return self._score(rollout, "log_probs", temperature)

    def scores(self, rollout: Rollout) -> Future[dict[str, Tensor]]:
        """``scores`` [rows], read at each row's last token."""
        return self._score(rollout, "scores")


class TrainedHandle(ModelHandle):
    """A model whose training units also score rows with the parameters of before the update."""

    kind: str

    def update(
        self, rows: Mapping[str, Any], objective: Objective, *, max_grad_norm: float, temperature: float = 1.0
    ) -> Future[dict[str, float]]:
        """One optimizer step on one minibatch.

        ``rows`` are all rows of the minibatch on every rank; each replica takes its share.
        ``objective(outputs, rows)`` gives a loss and statistics that are additive over rows and
        already divided by the whole minibatch's denominators, so that no split changes them.
        The future gives the summed statistics, ``loss`` and ``grad_norm`` (before clipping).
        """
        collection, plan = self.collection, self.runtime.plan[self.scoring]
        total = len(rows["input_ids"])
        mine = collection.rows(total)
        values: dict[str, float] | None = None
        assert collection.binding is not None
        if collection.unit is None:
            collection.binding.optimizer.step()  # changes nothing here; learning-rate schedules ask for it
        else:
            with self.runtime.clock.measure(self.scoring):
                local = {k: v[mine.start : mine.stop] if isinstance(v, Tensor) else v for k, v in rows.items()}
                stats = collection.executor.forward_backward(
                    local, objective, self.kind, plan.micro_batches, plan.recompute, temperature
                )
                collection.executor.reduce_gradients(collection.dp_group)
                norm = collection.executor.clip_(max_grad_norm)
                collection.binding.optimizer.step()
                for parameter in collection.executor.parameters.values():
                    parameter.grad = None
                summed = torch.stack([s.detach().double() for s in stats.values()])
                if collection.dp_group is not None:
                    torch.distributed.all_reduce(summed, group=collection.dp_group)
                values = {**dict(zip(stats, summed.tolist(), strict=True)), "grad_norm": float(norm)}
        collection.updates += 1
        return Future(lambda: self.runtime.share_values(self.scoring, values))


class ActorHandle(TrainedHandle):
    """The policy: samples responses, gives their log-probs, learns."""

    kind = "log_probs"

    def __init__(self, runtime: JobRuntime) -> None:
        super().__init__(runtime, Role.ACTOR, ACTOR_TRAINING)

    def generate(
        self, batch: Mapping[str, Any], *, samples: int, sampling: Sampling, step: int, seed: int
    ) -> Future[Rollout]:
        """Sample ``samples`` responses to each prompt; row ``r`` is sample ``r % samples`` of prompt ``r // samples``.

        A row's tokens depend on (seed, step, row, position) and the policy only, never on the plan.
        """
        collection = self.runtime.collections[ACTOR_GENERATION]
        prompts = {k: batch[k].repeat_interleave(samples, dim=0) for k in ("prompt_ids", "prompt_mask")}
        total = len(prompts["prompt_ids"])
        mine = collection.rows(total)
        local = None
        if collection.unit is not None:
            with self.runtime.clock.measure(ACTOR_GENERATION):
                rows = torch.arange(mine.start, mine.stop)
                generated = collection.executor.generate(
                    prompts["prompt_ids"][rows], prompts["prompt_mask"][rows], rows, step, seed, sampling
                )
                local = {
                    "response_ids": generated.response_ids,
                    "response_mask": generated.response_mask.to(torch.uint8),
                    "log_probs": generated.log_probs,
                }
        return Future(lambda: self._rollout(batch, prompts, samples, total, local))

    def _rollout(
        self,
        batch: Mapping[str, Any],
        prompts: Mapping[str, Tensor],
        samples: int,
        total: int,
        local: Mapping[str, Tensor] | None,
    ) -> Rollout:
        shared = self.runtime.share_rows(ACTOR_GENERATION, total, local)
        # What no response reaches would be scored and trained on for nothing.
        longest = int(shared["response_mask"].sum(dim=1).max())
        shared = {name: tensor[:, :longest] for name, tensor in shared.items()}
        return Rollout.of(batch, prompts, shared, samples)

    def log_probs(self, rollout: Rollout, temperature: float = 1.0) -> Future[dict[str, Tensor]]:
        """The training units' ``log_probs`` and ``entropy`` [rows, responses]: what the loss calls "old"."""
        return self._score(rollout, "log_probs", temperature)


class CriticHandle(TrainedHandle):
    """The value model."""

    kind = "values"

    def __init__(self, runtime: JobRuntime) -> None:
        super().__init__(runtime, Role.CRITIC, CRITIC_TRAINING)

    def values(self, rollout: Rollout) -> Future[dict[str, Tensor]]:
        """``values`` [rows, responses]: of the state before each response token."""
        return self._score(rollout, "values")


def make_handle(runtime: JobRuntime, role: Role) -> ModelHandle:
    """The handle of a role."""
    match role:
        case Role.ACTOR:
            return ActorHandle(runtime)
        case Role.CRITIC:
            return CriticHandle(runtime)
        case Role.REFERENCE:
            return ScoringHandle(runtime, role, REFERENCE_INFERENCE)
        case Role.REWARD:
            return ScoringHandle(runtime, role, REWARD_INFERENCE)
