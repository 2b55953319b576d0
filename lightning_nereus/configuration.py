"""A job from a Hydra configuration: the schema of ``conf/`` and what it builds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

from lightning_nereus.adaptation import AdaptationCallback, Inventory
from lightning_nereus.control.monitor import Thresholds
from lightning_nereus.errors import ConfigurationError
from lightning_nereus.hardware.cpu import describe_cpu
from lightning_nereus.report.record import RunObserver
from lightning_nereus.rl.countdown import ALPHABET, countdown_prompts
from lightning_nereus.rl.data import PromptDataModule
from lightning_nereus.rl.grpo import GRPOModule
from lightning_nereus.rl.module import RLModule
from lightning_nereus.rl.ppo import PPOModule
from lightning_nereus.rl.tokenizer import CharTokenizer, Tokenizer
from lightning_nereus.simulate.traces import PoolTrace
from lightning_nereus.strategy import DTYPES, NereusStrategy

COUNTDOWN = "countdown"
"""The name of the shipped prompts and of their tokenizer."""


class AlgorithmName(StrEnum):
    grpo = "grpo"
    ppo = "ppo"


ALGORITHMS: dict[AlgorithmName, type[RLModule]] = {AlgorithmName.grpo: GRPOModule, AlgorithmName.ppo: PPOModule}


@dataclass
class ModelConfig:
    """``pretrained`` for a name or directory, else ``type`` and ``config`` as ``transformers`` knows them and
    random weights. ``tokenizer`` is ``countdown``, a name or a directory; that of ``pretrained`` when null."""

    pretrained: str | None = None
    type: str = "qwen3"
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None


@dataclass
class StagesConfig:
    """The first plan: ``plan.ROLE.STAGE`` with tp, pp, dp, devices, micro_batches, recompute. Empty: planned."""

    plan: dict[str, Any] = field(default_factory=dict)


@dataclass
class CostConfig:
    headroom: float = 0.9


@dataclass
class AlgorithmConfig:
    """``arguments`` go to the algorithm's module."""

    name: AlgorithmName = AlgorithmName.grpo
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class ClusterConfig:
    devices: int = 2
    memory_mib: float | None = None


@dataclass
class BackendConfig:
    generation: str = "native"
    training: str = "native"


@dataclass
class ThresholdsConfig:
    length: float = 0.3
    compute: float = 0.25
    communication: float = 0.25


@dataclass
class PolicyConfig:
    name: str = "nereus"
    gamma: float = 0.5
    every: int = 10
    fallbacks: int = 3
    thresholds: ThresholdsConfig = field(default_factory=ThresholdsConfig)


@dataclass
class TraceConfig:
    """``path`` is a file or the name of a shipped excerpt; null for a pool that never changes."""

    path: str | None = None
    seconds_per_step: float = 60.0
    start_seconds: float = 0.0


@dataclass
class DataConfig:
    """``prompts`` is ``countdown`` or a JSON Lines file; ``reward`` a ``module:function``, null with a reward model."""

    prompts: str = COUNTDOWN
    reward: str | None = "lightning_nereus.rl.countdown:countdown_progress"
    batch_size: int = 8
    max_prompt_length: int | None = None


@dataclass
class NereusConfig:
    """The whole configuration. ``trainer`` goes to Lightning's Trainer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward_model: ModelConfig | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


ConfigStore.instance().store(name="nereus_schema", node=NereusConfig)


def config_directory() -> str:
    """Where ``conf/`` is: inside an installed package, at the top of a repository."""
    packed = Path(str(files("lightning_nereus"))) / "conf"
    return str(packed if packed.is_dir() else Path(__file__).resolve().parents[1] / "conf")


@dataclass(frozen=True)
class Job:
    """Everything that ``trainer.fit(module, data)`` needs."""

    trainer: Trainer
    module: RLModule
    data: PromptDataModule

    def fit(self) -> None:
        self.trainer.fit(self.module, self.data)


def build(config: DictConfig, directory: str | Path, observers: Sequence[RunObserver]) -> Job:
    """The job that a configuration describes; ``directory`` takes its logs, records and checkpoints.

    Raises:
        ConfigurationError: naming the field.
    """
    settings = cast(NereusConfig, OmegaConf.to_object(config))
    for name in ("generation", "training"):
        if getattr(settings.backend, name) != "native":
            raise ConfigurationError(f"backend.{name}", f"{getattr(settings.backend, name)!r} is unknown", "Use native")
    trainer = _trainer(settings, Path(directory), observers)
    tokenizer = _tokenizer(settings.model)
    prompts = countdown_prompts() if settings.data.prompts == COUNTDOWN else settings.data.prompts
    width = settings.data.max_prompt_length
    data = PromptDataModule(prompts, tokenizer, settings.data.batch_size, width, settings.seed)
    return Job(trainer, _module(settings, tokenizer), data)


def _trainer(settings: NereusConfig, directory: Path, observers: Sequence[RunObserver]) -> Trainer:
    options = {
        "accelerator": "cpu",
        "logger": CSVLogger(directory, name="", version=""),
        "default_root_dir": directory,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        **settings.trainer,
    }
    unknown = set(options) - set(inspect.signature(Trainer.__init__).parameters)
    unknown |= set(settings.trainer) & {"strategy", "callbacks", "devices"}
    if unknown:
        raise ConfigurationError(
            f"trainer.{sorted(unknown)[0]}", "is no setting of the Trainer that is free here", "Remove it"
        )
    precision = str(options.get("precision", "32-true"))
    if precision not in DTYPES:
        raise ConfigurationError("trainer.precision", f"{precision!r} is unknown", f"Use one of {', '.join(DTYPES)}")
    cluster, policy = settings.cluster, settings.policy
    if cluster.memory_mib is not None and not cluster.memory_mib > 0:
        raise ConfigurationError("cluster.memory_mib", f"{cluster.memory_mib} is none", "Use MiB above 0, or null")
    memory = None if cluster.memory_mib is None else cluster.memory_mib * 2**20
    thresholds = Thresholds(policy.thresholds.length, policy.thresholds.compute, policy.thresholds.communication)
    adaptation = AdaptationCallback(
        policy.name,
        policy.gamma,
        thresholds,
        every=policy.every,
        fallbacks=policy.fallbacks,
        headroom=settings.cost.headroom,
        inventory=_inventory(settings),
        observers=observers,
    )
    strategy = NereusStrategy(_plan(settings.stages.plan), describe_cpu(cluster.devices, DTYPES[precision], memory))
    try:
        return Trainer(strategy=strategy, devices=cluster.devices, callbacks=[adaptation], **options)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ConfigurationError("trainer", f"does not take these settings ({error})", "Mend them") from error


def _plan(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """``{role: {stage: ...}}`` as ``{"role.stage": ...}``; None for an empty one."""
    found = {}
    for role, stages in plan.items():
        if not isinstance(stages, Mapping) or not all(isinstance(each, Mapping) for each in stages.values()):
            raise ConfigurationError(f"stages.plan.{role}", f"is {stages!r}", "Write plan.ROLE.STAGE.tp=2")
        found.update({f"{role}.{stage}": dict(each) for stage, each in stages.items()})
    return found or None


def _inventory(settings: NereusConfig) -> Inventory | None:
    trace = settings.trace
    if trace.path is None:
        return None
    shipped = Path(str(files("lightning_nereus.simulate").joinpath(f"excerpts/{trace.path}.csv")))
    path = shipped if shipped.is_file() else Path(trace.path)
    return PoolTrace.read(path, settings.cluster.devices, trace.seconds_per_step, trace.start_seconds)


def _tokenizer(model: ModelConfig) -> Tokenizer:
    if model.tokenizer == COUNTDOWN:
        return CharTokenizer(ALPHABET)
    name = model.tokenizer or model.pretrained
    if name is None:
        raise ConfigurationError("model.tokenizer", "is missing", "Name one, or give model.pretrained")
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "model.tokenizer", f"{name} cannot be read ({error})", "Name one on the hub, or a directory"
        ) from error


def _model(model: ModelConfig, tokenizer: Tokenizer, field_name: str) -> Any:
    if model.pretrained is not None:
        return model.pretrained
    try:
        return AutoConfig.for_model(model.type, **{"vocab_size": tokenizer.vocab_size, **model.config})
    except Exception as error:  # each kind of model checks its settings in its own way
        if model.type not in CONFIG_MAPPING:
            raise ConfigurationError(
                f"{field_name}.type", f"{model.type!r} is unknown", "Use one of transformers'"
            ) from error
        raise ConfigurationError(f"{field_name}.config", f"is refused ({error})", "Mend it") from error


def _module(settings: NereusConfig, tokenizer: Tokenizer) -> RLModule:
    algorithm = settings.algorithm
    kind = ALGORITHMS[algorithm.name]
    arguments = {"seed": settings.seed, **algorithm.arguments}
    unknown = set(arguments) - set(inspect.signature(kind.__init__).parameters)
    unknown |= set(arguments) & {"self", "actor", "reward", "tokenizer"}  # given elsewhere
    if unknown:
        raise ConfigurationError(
            f"algorithm.arguments.{sorted(unknown)[0]}",
            f"is no argument of {kind.__name__} that is free here",
            "Remove it",
        )
    actor = _model(settings.model, tokenizer, "model")
    if (settings.data.reward is None) == (settings.reward_model is None):
        raise ConfigurationError("data.reward", "and reward_model must not both be given or missing", "Give one")
    if settings.reward_model is not None:
        if settings.reward_model.tokenizer not in (None, settings.model.tokenizer):
            raise ConfigurationError("reward_model.tokenizer", "differs from the actor's", "Use one tokenizer for both")
        reward = _model(settings.reward_model, tokenizer, "reward_model")
    else:
        reward = _function(cast(str, settings.data.reward))
    try:
        return cast(Any, kind)(actor, reward, tokenizer=tokenizer, **arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError("algorithm.arguments", f"are refused ({error})", "Mend them") from error


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError("data.reward", f"{name!r} is not found ({error})", "Write module:function") from error
    if not callable(function):
        raise ConfigurationError("data.reward", f"{name!r} is no function", "Write module:function")
    return function
