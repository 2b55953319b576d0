"""Seconds of one model-stage in one RL step (paper §4.2): computation, TP and PP traffic, the
pipeline's bubble, DP synchronisation. The slowest replica and the slowest pipeline stage count.

Computation and communication are kept apart, because they slow down for different reasons: devices
that share cores compute slower, a congested link sends slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lightning_nereus.cost.calibration import DEFAULT_EFFICIENCY, Calibration
from lightning_nereus.cost.memory import layer_counts, shard_elements
from lightning_nereus.cost.operations import (
    LinkType,
    Operation,
    OperationClass,
    collective,
    head_forward,
    layer_forward,
    optimizer_step,
)
from lightning_nereus.job import (
    Cluster,
    Head,
    JobSpec,
    Layout,
    ModelShape,
    ModelStage,
    Recompute,
    Stage,
    StagePlan,
    Workload,
)

# Launching one kernel from Python takes 3 to 10 microseconds on GPUs and CPUs alike.
LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of a part of a step: ``compute`` at a device's full rate, ``communication`` by calibration key."""

    compute: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)

    def total(self, slowdown: float) -> float:
        """Seconds where computation takes ``slowdown`` times as long."""
        return self.compute * slowdown + sum(self.communication.values())

    def __add__(self, other: Seconds) -> Seconds:
        keys = {**self.communication, **other.communication}
        mine, theirs = self.communication, other.communication
        return Seconds(self.compute + other.compute, {k: mine.get(k, 0.0) + theirs.get(k, 0.0) for k in keys})

    def times(self, count: float) -> Seconds:
        return Seconds(self.compute * count, {k: v * count for k, v in self.communication.items()})


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """A model-stage's two turns in a step: scoring of all rows before training, and what it is named for.

    Only trained model-stages score (old log-probs, values); of others all is ``main``.
    """

    scoring: Seconds
    main: Seconds

    def slower(self, factor: float) -> StageSeconds:
        """The same with computation that takes ``factor`` times as long."""
        return StageSeconds(
            Seconds(self.scoring.compute * factor, self.scoring.communication),
            Seconds(self.main.compute * factor, self.main.communication),
        )


@dataclass(frozen=True, slots=True)
class Links:
    """The slowest link inside the units' TP groups, between pipeline stages, and between replicas."""

    tp: LinkType
    pp: LinkType
    dp: LinkType


def links_of(stage_plan: StagePlan, cluster: Cluster) -> Links:
    """Which links a stage plan's groups send over."""
    tp = stage_plan.layout.tp
    groups = [unit[i : i + tp] for unit in stage_plan.units for i in range(0, len(unit), tp)]
    return Links(
        _link(cluster, groups), _link(cluster, stage_plan.units), _link(cluster, zip(*stage_plan.units, strict=True))
    )


def _link(cluster: Cluster, groups: Iterable[tuple[int, ...]]) -> LinkType:
    return LinkType.INTER if any(cluster.spans_nodes(group) for group in groups) else LinkType.INTRA


class Rates:
    """Seconds of operations on a cluster at the calibration's efficiencies as they are now."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self._device = cluster.device
        self._links = {LinkType.INTRA: cluster.intra_link, LinkType.INTER: cluster.inter_link}
        self._calibration = calibration
        self._efficiency: dict[tuple[OperationClass, LinkType | None], float] = {}

    def seconds(self, operation: Operation) -> float:
        """``max(FLOPs / (peak * eff), bytes / (bandwidth * eff)) + messages * latency``."""
        kind = operation.kind, operation.link
        efficiency = self._efficiency.get(kind)
        if efficiency is None:
            efficiency = self._efficiency[kind] = self._calibration.efficiency(*kind)
        if operation.link is not None:
            link = self._links[operation.link]
            # A slow link's latency suffers as its bandwidth does, so that the efficiency scales both.
            reached = efficiency / DEFAULT_EFFICIENCY[operation.kind]
            return operation.bytes / (link.bandwidth * efficiency) + operation.messages * link.latency / reached
        device = self._device
        work = max(operation.flops / device.peak_flops, operation.bytes / device.memory_bandwidth)
        return work / efficiency + operation.messages * LAUNCH_SECONDS

    def add(self, operations: Iterable[Operation]) -> Seconds:
        """Operations one after the other."""
        compute, communication = 0.0, {}
        for operation in operations:
            seconds = self.seconds(operation)
            if operation.link is None:
                compute += seconds
            elif seconds:
                communication[operation.key] = communication.get(operation.key, 0.0) + seconds
        return Seconds(compute, communication)


def stage_seconds(
    job: JobSpec, model_stage: ModelStage, stage_plan: StagePlan, workload: Workload, links: Links, rates: Rates
) -> StageSeconds:
    """Both turns of a model-stage in one RL step."""
    unit = _Unit(job, job.shape(model_stage), stage_plan, workload, links, rates)
    match model_stage.stage:
        case Stage.GENERATION:
            return StageSeconds(Seconds(), unit.generation())
        case Stage.INFERENCE:
            return StageSeconds(Seconds(), unit.scoring())
        case Stage.TRAINING:
            return StageSeconds(unit.scoring(), unit.training())


@dataclass(frozen=True, slots=True)
class _Unit:
    """One replica of a model-stage at work."""

    job: JobSpec
    shape: ModelShape
    stage_plan: StagePlan
    workload: Workload
    links: Links
    rates: Rates

    @property
    def layout(self) -> Layout:
        return self.stage_plan.layout

    @property
    def _width(self) -> float:
        # Rows are padded to the longest response of the batch, so that scoring and training are as wide as it.
        return self.workload.prompt_length + self.workload.response_length.longest

    def scoring(self) -> Seconds:
        """One forward pass over all rows, in micro-batches."""
        rows = -(-self.workload.rows // self.stage_plan.dp)
        micro_batches = min(self.stage_plan.micro_batches, rows)
        return self._pipeline(rows / micro_batches, micro_batches, forward=1, backward=0, head=1)

    def training(self) -> Seconds:
        """Every optimizer step of every epoch."""
        workload, plan = self.workload, self.stage_plan
        rows = -(-workload.minibatch_rows // plan.dp)
        micro_batches = min(plan.micro_batches, rows)
        forward = 2 if plan.recompute is Recompute.LAYER else 1
        # Logits are computed again in the backward pass whatever the policy, scores are not.
        head = 4 if self.shape.head is Head.LM else 3
        passes = self._pipeline(rows / micro_batches, micro_batches, forward=forward, backward=1, head=head)
        return (passes + self.rates.add(self._update())).times(workload.minibatches * workload.epochs)

    def _update(self) -> Iterator[Operation]:
        """Gradients are reduced when the backward pass has ended, over replicas and both ends of a tied embedding."""
        held, job = shard_elements(self.shape, self.layout), self.job
        if self.shape.tied and self.layout.pp > 1:
            embedding = self.shape.vocab * self.shape.hidden / self.layout.tp * job.parameter_bytes
            yield collective(OperationClass.ALL_REDUCE, self.links.pp, 2, embedding)
        if self.stage_plan.dp > 1:
            yield collective(OperationClass.ALL_REDUCE, self.links.dp, self.stage_plan.dp, held * job.parameter_bytes)
        yield optimizer_step(held, job.parameter_bytes, job.optimizer_bytes)

    def _pipeline(self, rows: float, micro_batches: int, *, forward: int, backward: int, head: int) -> Seconds:
        """Micro-batches of ``rows`` rows through all pipeline stages; a backward pass costs two forward passes.

        With ``pp`` stages the slowest of them works ``micro_batches`` times and waits ``pp - 1`` times.
        """
        shape, pp = self.shape, self.layout.pp
        layer = self.rates.add(self._layer(rows, self._width, self._width / 2))
        top = self.rates.seconds(head_forward(shape, self.layout.tp, self.job.parameter_bytes, rows * self._width))
        counts = layer_counts(shape, pp)
        compute = max(
            count * layer.compute * (forward + 2 * backward) + (head * top if rank == pp - 1 else 0.0)
            for rank, count in enumerate(counts)
        )
        # The backward pass of a layer sums as many hidden states over the tensor ranks as its forward pass.
        traffic = Seconds(0.0, layer.communication).times(max(counts) * (forward + backward))
        if pp > 1:
            hidden = rows * self._width * shape.hidden * self.job.parameter_bytes
            send = self.rates.add([collective(OperationClass.P2P, self.links.pp, 2, hidden)])
            traffic = traffic + send.times(1 + backward)
        return Seconds(compute, traffic.communication).times(micro_batches + pp - 1)

    def _layer(self, rows: float, tokens: float, context: float) -> Iterator[Operation]:
        """A layer's forward pass on one tensor rank, with its two sums of hidden states."""
        tp, element = self.layout.tp, self.job.parameter_bytes
        yield from layer_forward(self.shape, tp, element, rows, tokens, context)
        if tp > 1:
            hidden = rows * tokens * self.shape.hidden * element
            yield collective(OperationClass.ALL_REDUCE, self.links.tp, tp, hidden)
            yield collective(OperationClass.ALL_REDUCE, self.links.tp, tp, hidden)

    def generation(self) -> Seconds:
        """Prefill, then one pass through all pipeline stages for each token while a row is alive.

        Between two quantiles of the length distribution the number of rows alive is that at the lower one;
        the last row alone is alive until the longest response ends (design §7: the tail counts).
        """
        rows = -(-self.workload.rows // self.stage_plan.dp)
        prompt = max(self.workload.prompt_length, 1.0)
        total = self._token_pass(rows, prompt, prompt / 2)
        quantiles = self.workload.response_length.quantiles
        done = 0.0
        for index, length in enumerate(quantiles):
            alive = rows if index == 0 else max(1.0, rows * (1 - (index - 1) / (len(quantiles) - 1)))
            steps = length - done
            if steps > 0:
                total = total + self._token_pass(alive, 1.0, prompt + done + steps / 2).times(steps)
                done = length
        return total

    def _token_pass(self, rows: float, tokens: float, context: float) -> Seconds:
        """All rows through the pipeline's stages in turn, and the next token of each told to all of them.

        The first token comes with the prefill, so that a response of n tokens takes n passes here, one too many:
        a fixed cost that is far below the model's accuracy.
        """
        return self.rates.add(self._layer(rows, tokens, context)).times(self.shape.layers) + self.rates.add(
            self._next_token(rows, tokens)
        )

    def _next_token(self, rows: float, tokens: float) -> Iterator[Operation]:
        layout, element = self.layout, self.job.parameter_bytes
        yield head_forward(self.shape, layout.tp, element, rows)
        if layout.tp > 1:
            logits = rows * self.shape.vocab * element
            yield collective(OperationClass.ALL_REDUCE, self.links.tp, layout.tp, logits)
        if layout.pp > 1:
            hidden = rows * tokens * self.shape.hidden * element
            for _ in range(layout.pp - 1):
                yield collective(OperationClass.P2P, self.links.pp, 2, hidden)
            # A token's number and its log-prob.
            yield collective(OperationClass.BROADCAST, self.links.pp, layout.pp, rows * (8 + element))
