"""What a model-stage takes of one device's memory, in bytes (paper §4.2).

Resident is what stays between its turns: parameters, and for trained models gradients and
optimizer tensors. Transient is what it takes while it runs: activations by recompute policy, KV cache,
logits, message buffers. Model-stages on one device take turns, so that their residents add up and
only the largest transient counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from lightning_nereus.cost.operations import kv_heads_held
from lightning_nereus.job import Head, JobSpec, Layout, ModelShape, ModelStage, Recompute, Stage, StagePlan, Workload

# The native backend cuts logits into chunks of this many elements over the whole vocabulary.
LOGIT_ELEMENTS = 2**22
# Log-probs keep a chunk's logits, the shifted logits and their exponentials at the same time.
LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device: ``resident`` always, ``transient`` at the worst moment of the step."""

    resident: float
    transient: float

    @property
    def total(self) -> float:
        return self.resident + self.transient


def layer_counts(shape: ModelShape, pp: int) -> tuple[int, ...]:
    """Decoder layers of each pipeline stage."""
    cuts = [shape.layers * rank // pp for rank in range(pp + 1)]
    return tuple(stop - start for start, stop in pairwise(cuts))


@lru_cache(maxsize=4096)
def shard_elements(shape: ModelShape, layout: Layout) -> int:
    """Parameter elements of the fullest position of a layout."""
    return max(
        layers * _layer_elements(shape, layout.tp, tensor_rank)
        + _end_elements(shape, layout, pipeline_rank, tensor_rank)
        for pipeline_rank, layers in enumerate(layer_counts(shape, layout.pp))
        for tensor_rank in range(layout.tp)
    )


def _part(total: int, parts: int, index: int) -> int:
    return total * (index + 1) // parts - total * index // parts


def _layer_elements(shape: ModelShape, tp: int, tensor_rank: int) -> int:
    query = _part(shape.heads, tp, tensor_rank) * shape.head_dim
    key_value = kv_heads_held(shape, tp, tensor_rank) * shape.head_dim
    attention = shape.hidden * (2 * query + 2 * key_value)
    biases = query + 2 * key_value if shape.attention_bias else 0
    norms = shape.norms_per_layer * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    return attention + biases + norms + 3 * shape.hidden * _part(shape.intermediate, tp, tensor_rank)


def _end_elements(shape: ModelShape, layout: Layout, pipeline_rank: int, tensor_rank: int) -> int:
    """Embedding on the first pipeline stage, norm and head on the last; a tied embedding on both."""
    first, last = pipeline_rank == 0, pipeline_rank == layout.pp - 1
    vocabulary = _part(shape.vocab, layout.tp, tensor_rank) * shape.hidden
    elements = vocabulary if first or (last and shape.tied) else 0
    if last:
        elements += shape.hidden
        if shape.head is Head.SCORE:
            elements += shape.hidden
        elif not shape.tied:
            elements += vocabulary
    return elements


def stage_memory(job: JobSpec, model_stage: ModelStage, stage_plan: StagePlan, workload: Workload) -> MemoryEstimate:
    """Bytes that one model-stage takes on the fullest of its devices."""
    shape, element = job.shape(model_stage), job.parameter_bytes
    held = shard_elements(shape, stage_plan.layout)
    resident = held * element
    if job.is_trained(model_stage):
        resident += held * (element + job.optimizer_bytes)
    match model_stage.stage:
        case Stage.GENERATION:
            transient = _generation(shape, stage_plan, workload, element)
        case Stage.INFERENCE:
            transient = _scoring(shape, stage_plan, workload, element)
        case Stage.TRAINING:
            transient = max(
                _scoring(shape, stage_plan, workload, element), _training(shape, stage_plan, workload, element, held)
            )
    return MemoryEstimate(resident, transient)


def _activations(shape: ModelShape, tp: int) -> float:
    """Elements a token that one layer keeps for its backward pass, on one tensor rank.

    Inputs of norms and of the residual sums; queries, keys, values before and after rotation and the
    attention's output; gate, up, their activation and product. Attention itself is fused and keeps none.
    """
    query, key_value = shape.heads * shape.head_dim / tp, kv_heads_held(shape, tp, 0) * shape.head_dim
    return (2 * shape.norms_per_layer + 2) * shape.hidden + 3 * query + 4 * key_value + 4 * -(-shape.intermediate // tp)


def _logits(shape: ModelShape, tp: int, tokens: float, element: float) -> float:
    """Bytes of one chunk of logits on one tensor rank; scores have none. Computed in 4 bytes at least."""
    if shape.head is Head.SCORE:
        return 0.0
    chunk = min(tokens, max(1, LOGIT_ELEMENTS // shape.vocab))
    return LOGIT_COPIES * chunk * -(-shape.vocab // tp) * max(element, 4)


def _rows(total: int, stage_plan: StagePlan) -> int:
    """Rows of one micro-batch of the fullest replica."""
    replica = -(-total // stage_plan.dp)
    return -(-replica // min(stage_plan.micro_batches, replica))


def _width(workload: Workload) -> float:
    # Rows are padded to the longest response of the batch, so that scoring and training are as wide as it.
    return workload.prompt_length + workload.response_length.longest


def _scoring(shape: ModelShape, stage_plan: StagePlan, workload: Workload, element: float) -> float:
    """A forward pass keeps one layer's activations and the hidden states that go in and out."""
    tp = stage_plan.layout.tp
    tokens = _rows(workload.rows, stage_plan) * _width(workload)
    return tokens * (_activations(shape, tp) + 2 * shape.hidden) * element + _logits(shape, tp, tokens, element)


def _training(shape: ModelShape, stage_plan: StagePlan, workload: Workload, element: float, held: int) -> float:
    layout = stage_plan.layout
    tokens = _rows(workload.minibatch_rows, stage_plan) * _width(workload)
    layers = max(layer_counts(shape, layout.pp))
    one_layer = _activations(shape, layout.tp)
    # 1F1B holds as many micro-batches as there are pipeline stages behind the first.
    in_flight = min(layout.pp, stage_plan.micro_batches)
    if stage_plan.recompute is Recompute.LAYER:
        kept = in_flight * layers * shape.hidden + one_layer
    else:
        kept = in_flight * layers * one_layer
    backward = tokens * (kept + 2 * shape.hidden) * element + _logits(shape, layout.tp, tokens, element)
    # Replicas reduce their gradients as one flat copy, when the activations are gone.
    flat = held * element if stage_plan.dp > 1 else 0.0
    return max(backward, flat)


def _generation(shape: ModelShape, stage_plan: StagePlan, workload: Workload, element: float) -> float:
    layout = stage_plan.layout
    rows = -(-workload.rows // stage_plan.dp)
    heads = max(kv_heads_held(shape, layout.tp, rank) for rank in range(layout.tp))
    token = 2 * heads * shape.head_dim * max(layer_counts(shape, layout.pp)) * element
    cache = rows * _width(workload) * token
    prefill = rows * workload.prompt_length * (_activations(shape, layout.tp) + 2 * shape.hidden) * element
    # Sampling sees every logit of a row, whatever tp.
    logits = 0.0 if shape.head is Head.SCORE else LOGIT_COPIES * rows * shape.vocab * max(element, 4)
    return cache + max(prefill, logits)
