"""NereusStrategy: what Lightning's Trainer talks to. Owns the world, the units and their plan; no algorithms.

    Trainer(strategy=NereusStrategy(), accelerator="cpu", devices=8, max_steps=100)   # strategy="nereus" means the same

One process a device, forked by a launcher whose store outlives any of them. The module's models
live in units, not in ``module.parameters()``; optimizers follow them through every transition.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_nereus.adaptation import AdaptationCallback
from lightning_nereus.backends.native.build import unit_collection
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.hardware.cpu import describe_cpu
from lightning_nereus.job import Cluster, JobSpec, ModelStage, Plan
from lightning_nereus.launch.local import LocalLauncher
from lightning_nereus.rl.module import RLModule
from lightning_nereus.runtime import checkpoint as checkpoints
from lightning_nereus.runtime.job import JobRuntime, TransitionReport, check_plan
from lightning_nereus.runtime.unit import OptimizerBinding
from lightning_nereus.runtime.world import WorkerContext, World
from lightning_nereus.transition.graph import TransitionGraph

# Longer than any step of a healthy job, short enough that a silent peer does not hold the others for good.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

DTYPES = {"64-true": torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16}


class NereusStrategy(ParallelStrategy):
    """Runs an RL job under a plan that can change at every safe boundary.

    Args:
        plan: the first plan, as a :class:`Plan` or its dictionary; the fastest that fits when None.
        cluster: what the devices are; this machine's cores and memory, measured, when None.
        timeout: deadline of each collective.

    Raises:
        ConfigurationError: when the Trainer's settings cannot work here, before any process starts.
    """

    strategy_name = "nereus"
    is_distributed = True  # without it, Lightning makes `sync_dist=True` a silent no-op

    def __init__(
        self,
        plan: Plan | Mapping[str, Mapping[str, Any]] | None = None,
        cluster: Cluster | None = None,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
        **lightning_arguments: Any,
    ) -> None:
        super().__init__(**lightning_arguments)
        self.first_plan = plan if plan is None or isinstance(plan, Plan) else Plan.from_dict(plan)
        self.cluster = cluster
        self.timeout = timeout
        self.num_nodes = 1  # Lightning writes the Trainer's setting here
        self._context: WorkerContext | None = None
        self._world: World | None = None
        self._runtime: JobRuntime | None = None
        self._start_plan: Plan | None = None
        self._trained_module: RLModule | None = None
        self._trained: TemporaryDirectory[str] | None = None

    # Where this process stands

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        return self._context.rank if self._context else 0

    @property
    def local_rank(self) -> int:
        return self.global_rank

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads the same global order and takes its rows by DP rank, whatever the plan."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision_plugin.precision]

    @property
    def runtime(self) -> JobRuntime:
        if self._runtime is None:
            raise RuntimeError("the units exist between strategy set-up and teardown only")
        return self._runtime

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.runtime.plan

    # Before and at the start of the processes

    def _configure_launcher(self) -> None:
        if self.world_size > 1:
            self._launcher = LocalLauncher(
                self.world_size,
                enter=self._enter,
                prepare=self._check_before_fork,
                collect=self._collect,
                restore=self._restore,
            )

    def _enter(self, context: WorkerContext) -> None:
        self._context = context
        rank_zero_only.rank = context.rank  # one object for all of Lightning, set when it was imported

    def _check_before_fork(self, trainer: Trainer | None, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, LightningDataModule) and trainer is not None:
                # Lightning does so in each rank, too late to refuse anything.
                trainer.datamodule = argument  # type: ignore[attr-defined]
        if trainer is not None and trainer.lightning_module is not None:
            self.check(trainer.lightning_module, trainer)

    def check(self, module: LightningModule, trainer: Trainer) -> None:
        """Refuse what cannot work. Reads configurations only.

        Raises:
            ConfigurationError: naming the field and the mend.
        """
        assert self.parallel_devices is not None
        if any(device.type != "cpu" for device in self.parallel_devices):
            raise ConfigurationError("accelerator", "only CPU ranks are supported so far", 'Use accelerator="cpu"')
        if self.num_nodes != 1:
            raise ConfigurationError("num_nodes", "more than one is not supported so far", "Use num_nodes=1")
        if self.cluster_environment is not None and self.cluster_environment.creates_processes_externally:
            raise ConfigurationError(
                "launcher", "processes started by torchrun or SLURM are not supported so far", "Start one process"
            )
        if self.precision_plugin.precision not in DTYPES:
            raise ConfigurationError(
                "precision", f"{self.precision_plugin.precision!r} is not supported", f"Use one of {', '.join(DTYPES)}"
            )
        if not isinstance(module, RLModule):
            raise ConfigurationError(
                "module",
                f"{type(module).__name__} is no RLModule",
                "Pass a GRPOModule, a PPOModule or your own RLModule",
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                "accumulate_grad_batches",
                "an RL step is already one whole batch",
                "Set the plan's micro_batches instead",
            )
        if trainer.gradient_clip_val:
            raise ConfigurationError(
                "gradient_clip_val", "is Lightning's, for one optimizer", "Set the module's max_grad_norm instead"
            )
        module.check(trainer)
        _hush()
        self._start_plan = self._choose_plan(module, trainer)
        if self._trained is None or self._trained_module is not module:
            # What one module learned is none of another's business.
            self._trained, self._trained_module = TemporaryDirectory(prefix="nereus-trained-"), module

    def job_spec(self, module: RLModule) -> JobSpec:
        """The models of a module, with the bytes that they take at this precision under Adam."""
        size = self.dtype.itemsize
        shapes = {role: source.shape for role, source in module.sources.items()}
        return JobSpec.of(shapes, parameter_bytes=size, optimizer_bytes=2 * size)

    def _choose_plan(self, module: RLModule, trainer: Trainer) -> Plan:
        job, workload = self.job_spec(module), module.workload(trainer)
        shard_maps = {m: module.sources[m.role].shard_map() for m in job.model_stages}
        if self.first_plan is not None:
            check_plan(self.first_plan, shard_maps, self.world_size)
            module.check_plan(self.first_plan, workload)
        adaptation = self._adaptation(trainer)
        adaptation.prepare(job, self._describe_cluster(), shard_maps, workload)
        return self.first_plan or adaptation.initial_plan()

    def _describe_cluster(self) -> Cluster:
        cluster = self.cluster or describe_cpu(self.world_size, self.dtype)
        if cluster.devices != self.world_size:
            raise ConfigurationError(
                "cluster",
                f"has {cluster.devices} devices, the Trainer has {self.world_size}",
                "Give both the same number",
            )
        return cluster

    @staticmethod
    def _adaptation(trainer: Trainer) -> AdaptationCallback:
        """The Trainer's AdaptationCallback (it takes no two); one with the defaults joins it where there is none."""
        for callback in _callbacks(trainer):
            if isinstance(callback, AdaptationCallback):
                return callback
        supplied = AdaptationCallback()
        _callbacks(trainer).insert(0, supplied)
        return supplied

    # Lightning's set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._context is not None:
            self._world = World.join(self._context, timeout=self.timeout)
        else:
            assert self.lightning_module is not None
            self.check(self.lightning_module, self.lightning_module.trainer)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert isinstance(module, RLModule)
        job = self.job_spec(module)
        communicators = self._world.communicators if self._world else None
        collections = {
            m: unit_collection(m, module.sources[m.role], self.global_rank, communicators, self.dtype)
            for m in job.model_stages
        }
        assert self._start_plan is not None
        self._runtime = JobRuntime(job, self._start_plan, collections, self.global_rank, self.world_size, communicators)
        self._runtime.materialise()
        module.bind(self._runtime)
        super().setup(trainer)
        assert self._trained is not None
        checkpoints.load_parameters(Path(self._trained.name), self._runtime)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for model_stage, collection in self.runtime.collections.items():
            if JobSpec.is_trained(model_stage):
                collection.binding = self._bind_optimizer(model_stage)

    def _bind_optimizer(self, model_stage: ModelStage) -> OptimizerBinding:
        """Find the optimizer of a trained model-stage and which group takes which parameter."""
        collection = self.runtime.collections[model_stage]
        mine = dict(collection.executor.parameters) if collection.executor else {}
        known = {id(p) for p in [*mine.values(), collection.placeholder]}
        owners = [o for o in self.optimizers if any(id(p) in known for g in o.param_groups for p in g["params"])]
        if len(owners) != 1:
            raise ConfigurationError(
                f"configure_optimizers {model_stage.role}",
                f"{len(owners)} optimizers hold its parameters",
                f"Return one optimizer over self.{model_stage.role}.parameters()",
            )
        index = {id(p): i for i, group in enumerate(owners[0].param_groups) for p in group["params"]}
        held = {name: index[id(p)] for name, p in mine.items() if id(p) in index}
        group_of: dict[str, int] = {}
        for part in self.runtime.gather(held):
            group_of.update(part)
        missing = [name for name in collection.shard_map if name not in group_of]
        if missing:
            raise ConfigurationError(
                f"configure_optimizers {model_stage.role}",
                f"the optimizer lacks {missing[0]}",
                "Give it every parameter; freeze one by a group with lr=0",
            )
        return OptimizerBinding(owners[0], group_of, collection.placeholder)

    def model_to_device(self) -> None:
        """Units are built where they live."""

    def post_training_step(self) -> None:
        """One RL step is one ``global_step``, whatever the number of optimizers and minibatches inside."""
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    # Adaptation

    def relay(self, target: Plan, graph: TransitionGraph | None = None) -> TransitionReport:
        """Re-lay the units from the plan in force to ``target``. Every rank calls it at a safe boundary."""
        module = self.lightning_module
        assert isinstance(module, RLModule)
        module.check_plan(target, module.workload(module.trainer))
        return self.runtime.transition(target, graph)

    # Collectives that Lightning asks for

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    def barrier(self, name: str | None = None) -> None:
        if self._world is not None and dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._world is None or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    # Checkpoints: a directory with Lightning's own dictionary and the units' tensors in layout-free form

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The units must stand before their tensors are read."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Tensors go through :meth:`save_checkpoint`; the dictionary carries what they need to be read again."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {"param_groups": groups}  # the state goes through save_checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update(saved)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write ``filepath`` as a directory; a checkpoint that is there is replaced only when the new one is whole."""
        target = Path(str(self.broadcast(str(filepath))))
        part = target.with_name(target.name + ".part")
        if self.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.barrier()
        checkpoint["nereus"] = checkpoints.save(part, self.runtime)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, part / checkpoints.LIGHTNING_FILE, storage_options)
            checkpoints.discard(target)
            part.rename(target)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = checkpoints.lightning_file(checkpoint_path)
        checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=bool(weights_only))
        checkpoint["nereus"]["directory"] = str(path.parent)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        about = checkpoint["nereus"]
        checkpoints.load(Path(about["directory"]), self.runtime, about)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoints.discard(Path(filepath))

    # The end

    def on_train_end(self) -> None:
        """Keep what was learned for the next ``fit``, ``validate`` or ``test`` of this Trainer."""
        assert self._trained is not None
        checkpoints.save(Path(self._trained.name), self.runtime)

    def _collect(self, trainer: Trainer) -> dict[str, Any]:
        """What the parent's Trainer must know of the ranks' run."""
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "state": (trainer.state.status, trainer.state.fn, trainer.state.stage),
            "metrics": {k: v.cpu() for k, v in trainer._logger_connector.callback_metrics.items()},
            "callbacks": {c.state_key: c.state_dict() for c in _callbacks(trainer)},
            "best_model_path": best,
        }

    def _restore(self, trainer: Trainer, ran: dict[str, Any]) -> None:
        trainer.fit_loop.load_state_dict(ran["fit_loop"])
        trainer.state.status, trainer.state.fn, trainer.state.stage = ran["state"]
        trainer._logger_connector._callback_metrics.update(ran["metrics"])
        for callback in _callbacks(trainer):
            callback.load_state_dict(ran["callbacks"][callback.state_key])

    def teardown(self) -> None:
        super().teardown()
        module = self.lightning_module
        if isinstance(module, RLModule):
            module.unbind()
        self._runtime = None
        if self._world is not None:
            self._world.close()
            self._world = None


# Warnings that are true of other strategies, and what they would have a user look for in vain.
_UNTRUE = (
    r"Total length of `list` across ranks is zero",  # no prompts are held out for validation
    r"The dirpath has changed from",  # the Trainer of the parent hears of the ranks' checkpoints
    r"torch\.distributed is disabled, unavailable or uninitialized",  # one device needs no process group
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # between Lightning and torch, once a rank
    r"Using ModelCheckpoint with manual optimization",  # checkpoints are made at the end of an RL step
)


def _hush() -> None:
    for message in _UNTRUE:
        warnings.filterwarnings("ignore", message=message)


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


StrategyRegistry.register(NereusStrategy.strategy_name, NereusStrategy, description=NereusStrategy.__doc__)
