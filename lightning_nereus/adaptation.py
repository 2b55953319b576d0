"""AdaptationCallback: telemetry -> Monitor -> Planner -> transition -> Admission -> re-laid units (design §3).

Rank 0 decides at the end of an RL step, a safe boundary; every rank hears the decision, compiles the same
transition from it and carries out its own part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_nereus.control.controller import Controller, ControllerOptions, Policy
from lightning_nereus.control.decisions import Decision
from lightning_nereus.control.monitor import StepTelemetry, Thresholds
from lightning_nereus.errors import ConfigurationError, InfeasiblePlanError
from lightning_nereus.job import Cluster, JobSpec, ModelStage, Plan, Workload
from lightning_nereus.report.record import (
    DecisionRecord,
    RunHead,
    RunObserver,
    RunRecorder,
    StepRecord,
    TransitionRecord,
)
from lightning_nereus.rl.module import RLModule
from lightning_nereus.simulate.traces import PoolTrace
from lightning_nereus.transition import ShardMap

if TYPE_CHECKING:
    from lightning_nereus.strategy import NereusStrategy


class Inventory(Protocol):
    """Says which devices an RL step may use: numbers below the Trainer's ``devices``, at least one."""

    def devices_at(self, step: int) -> tuple[int, ...]: ...


class AdaptationCallback(Callback):
    """Changes the job's plan while it runs. :class:`NereusStrategy` adds one when the Trainer has none.

    Args:
        policy: ``nereus``, or what it is compared with: ``static``, ``always``, ``every_k``.
        gamma: share of the horizon within which a transition has to pay back.
        thresholds: relative drifts that trigger a replan.
        every: steps between replans of ``every_k``.
        fallbacks: targets besides the best that are considered.
        headroom: share of a device's memory that plans and transitions may fill.
        inventory: which devices each step may use, as a :class:`PoolTrace` or your own :class:`Inventory`; all of
            them when None.
        observers: are told of every step and decision on rank 0; a :class:`RunRecorder` when None.

    Raises:
        ConfigurationError: naming the field.
    """

    def __init__(
        self,
        policy: Policy | str = Policy.NEREUS,
        gamma: float = 0.5,
        thresholds: Thresholds | None = None,
        *,
        every: int = 10,
        fallbacks: int = 3,
        headroom: float = 0.9,
        inventory: Inventory | None = None,
        observers: Sequence[RunObserver] | None = None,
    ) -> None:
        self.options = ControllerOptions(policy, gamma, thresholds or Thresholds(), every, fallbacks, headroom)
        self.observers: tuple[RunObserver, ...] = (RunRecorder(),) if observers is None else tuple(observers)
        if inventory is not None and not callable(getattr(inventory, "devices_at", None)):
            raise ConfigurationError(
                "inventory", f"{inventory!r} has no devices_at(step)", "Give a PoolTrace, or write that method"
            )
        self.inventory = inventory
        self._pool: tuple[int, ...] = ()
        self._controller: Controller | None = None
        self._state: dict[str, Any] | None = None
        self._step_start = 0.0
        self._predicted = 0.0

    @property
    def controller(self) -> Controller:
        if self._controller is None:
            raise RuntimeError("the controller exists once the strategy has described the job")
        return self._controller

    def prepare(
        self, job: JobSpec, cluster: Cluster, shard_maps: Mapping[ModelStage, ShardMap], workload: Workload
    ) -> None:
        """Called by the strategy before any process starts."""
        self._controller = Controller(job, cluster, shard_maps, workload, self.options)
        if isinstance(self.inventory, PoolTrace):
            for step, _ in self.inventory.changes:
                self._devices_at(step)
        if self._state is not None:
            self._controller.load_state_dict(self._state)

    def initial_plan(self) -> Plan:
        """The fastest plan that fits the pool before the first step.

        Raises:
            ConfigurationError: if the inventory names no device of the job, or others.
            InfeasiblePlanError: if none fits.
        """
        return self.controller.initial_plan(self._devices_at(0))

    # The corridor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, step = _strategy(trainer), trainer.global_step
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast, so that every rank asks
        decision: Decision | None = None
        if trainer.is_global_zero:
            cluster = self.controller.cost_model.cluster
            policy, memory = str(self.options.policy), cluster.device.memory_bytes
            head = RunHead(policy, cluster.devices, memory, strategy.plan, step)
            for observer in self.observers:
                observer.started(head, directory)
            self._pool = self._devices_at(step)
            decision = self.controller.start(self._pool, strategy.plan, step)
        self._settle(decision, trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        _strategy(trainer).runtime.clock.drain()  # what validation took is no part of a step
        self._step_start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy, step = _strategy(trainer), trainer.global_step
        telemetry = self._telemetry(trainer, pl_module)
        pl_module.log_dict(_metrics(telemetry, strategy.plan))
        if trainer.is_global_zero:
            self._show_step(trainer, telemetry, strategy.plan)
        self._pool = telemetry.pool
        decision: Decision | None = None
        if trainer.is_global_zero and not 0 <= trainer.max_steps <= step:  # after the last step nothing pays
            decision = self.controller.step(telemetry, strategy.plan)
        self._settle(decision, trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    # Resume

    def state_dict(self) -> dict[str, Any]:
        return {} if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._state = state_dict
            if self._controller is not None:
                self._controller.load_state_dict(state_dict)

    # Parts

    def _devices_at(self, step: int) -> tuple[int, ...]:
        devices = self.controller.cost_model.cluster.devices
        if self.inventory is None:
            return tuple(range(devices))
        pool = self.inventory.devices_at(step)
        if not isinstance(pool, tuple) or not pool or not set(pool) <= set(range(devices)):
            raise ConfigurationError(
                "inventory",
                f"gives {pool} for step {step}",
                f"Name at least one of the job's devices 0-{devices - 1}",
            )
        return pool

    def _telemetry(self, trainer: Trainer, pl_module: LightningModule) -> StepTelemetry:
        """This step as all ranks saw it: of each model-stage the slowest rank's seconds."""
        assert isinstance(pl_module, RLModule)
        runtime = _strategy(trainer).runtime
        mine = runtime.clock.drain()
        seconds = torch.tensor([mine.get(m, 0.0) for m in runtime.plan] + [time.perf_counter() - self._step_start])
        runtime.all_reduce(seconds, "max")
        *stages, whole = seconds.tolist()
        lengths = tuple(float(length) for length in pl_module.lengths)
        return StepTelemetry(
            trainer.global_step,
            self._devices_at(trainer.global_step),
            lengths,
            pl_module.workload(trainer).prompt_length,
            {m: s for m, s in zip(runtime.plan, stages, strict=True) if s > 0},
            whole,
        )

    def _settle(self, decision: Decision | None, trainer: Trainer) -> None:
        """Tell every rank what rank 0 decided, carry it out, and put it on record."""
        strategy = _strategy(trainer)
        decision = strategy.broadcast(decision)
        transition = self._carry_out(decision, strategy) if decision is not None and decision.target else None
        if trainer.is_global_zero:
            self._show_decision(decision, transition, strategy)
        if decision is not None and decision.stranded and not decision.admitted:
            raise InfeasiblePlanError(f"{decision.trigger.reason}, and it cannot be left: {decision.reason}")

    def _show_decision(
        self, decision: Decision | None, transition: TransitionRecord | None, strategy: NereusStrategy
    ) -> None:
        self._predicted = self.controller.predict(strategy.plan).step_seconds
        if decision is not None:
            trigger = decision.trigger
            rank_zero_info(f"After step {trigger.step}, {decision.outcome}: {trigger.reason}; {decision.reason}")
            for observer in self.observers:
                observer.decided(DecisionRecord(decision, transition))

    def _carry_out(self, decision: Decision, strategy: NereusStrategy) -> TransitionRecord:
        assert decision.target is not None
        graph, _ = self.controller.transition(decision.current, decision.target.plan)
        report = strategy.relay(decision.target.plan, graph)
        self.controller.observe_transition(decision, report.seconds)
        return TransitionRecord(report.seconds, report.moved_bytes, report.primitives)

    def _show_step(self, trainer: Trainer, telemetry: StepTelemetry, plan: Plan) -> None:
        record = StepRecord(
            telemetry.step,
            telemetry.step_seconds,
            self._predicted,
            float(trainer.callback_metrics.get("reward", float("nan"))),
            sum(telemetry.lengths) / len(telemetry.lengths),
            sum(telemetry.lengths) / telemetry.step_seconds,
            self._pool,
            plan,
            {str(m): s for m, s in telemetry.stage_seconds.items()},
        )
        for observer in self.observers:
            observer.stepped(record)

    def _end(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            for observer in self.observers:
                observer.ended()


def _metrics(telemetry: StepTelemetry, plan: Plan) -> dict[str, float]:
    return {
        "nereus/seconds": telemetry.step_seconds,
        "nereus/tokens_per_second": sum(telemetry.lengths) / telemetry.step_seconds,
        "nereus/devices": float(len(plan.devices)),
    }


def _strategy(trainer: Trainer) -> NereusStrategy:
    return trainer.strategy  # type: ignore[return-value]
