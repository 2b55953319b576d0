"""Operations of a step as FLOPs, bytes and messages, by class (paper §4.2).

Efficiencies are kept per class and not per operation, so that plans and models that are built of the
same classes share what was learned. Sizes are those of one device: one tensor rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from lightning_nereus.job import Head, ModelShape


class OperationClass(StrEnum):
    """What an operation is; all operations of one class share an efficiency."""

    GEMM = "gemm"
    ATTENTION_PREFILL = "attention_prefill"
    ATTENTION_DECODE = "attention_decode"
    LOGITS = "logits"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    P2P = "p2p"


class LinkType(StrEnum):
    """Which of a cluster's links an operation sends over."""

    INTRA = "intra"
    INTER = "inter"


@dataclass(frozen=True, slots=True)
class Operation:
    """Work of one device. ``bytes`` are read and written in its memory, or sent over ``link``;
    ``messages`` are messages on a link, kernel launches without one."""

    kind: OperationClass
    flops: float = 0.0
    bytes: float = 0.0
    messages: float = 0.0
    link: LinkType | None = None

    @property
    def key(self) -> str:
        """The name of its efficiency: the class, and the link type where it has one."""
        return str(self.kind) if self.link is None else f"{self.kind}.{self.link}"


def collective(kind: OperationClass, link: LinkType, members: int, size: float) -> Operation:
    """A collective of ``size`` bytes over ``members`` devices by the ring algorithms, as one of them sees it."""
    others = members - 1
    match kind:
        case OperationClass.ALL_REDUCE:
            sent, messages = 2 * size * others / members, 2 * others
        case OperationClass.ALL_GATHER | OperationClass.REDUCE_SCATTER:
            sent, messages = size * others / members, others
        case _:
            sent, messages = (size, others) if others else (0.0, 0)
    return Operation(kind, bytes=sent, messages=messages, link=link)


def kv_heads_held(shape: ModelShape, tp: int, tensor_rank: int) -> int:
    """Key-value heads that one tensor rank holds: each that one of its query heads reads."""
    group = shape.heads // shape.kv_heads
    start, stop = shape.heads * tensor_rank // tp, shape.heads * (tensor_rank + 1) // tp
    return -(-stop // group) - start // group


def _widths(shape: ModelShape, tp: int) -> tuple[float, float, float]:
    """(query, key-value, intermediate) widths on one tensor rank; its key-value heads are at least one."""
    return (
        shape.heads * shape.head_dim / tp,
        kv_heads_held(shape, tp, 0) * shape.head_dim,
        shape.intermediate / tp,
    )


def layer_forward(
    shape: ModelShape, tp: int, element_bytes: float, rows: float, tokens: float, context: float
) -> Iterator[Operation]:
    """One decoder layer over ``tokens`` new tokens of each row, which attend to ``context`` tokens on average."""
    query, key_value, intermediate = _widths(shape, tp)
    hidden, total = shape.hidden, rows * tokens
    weights = hidden * (2 * query + 2 * key_value) + 3 * hidden * intermediate
    activations = total * (4 * hidden + 2 * query + 2 * key_value + 3 * intermediate)
    yield Operation(OperationClass.GEMM, 2 * total * weights, element_bytes * (weights + activations), 7)
    kind = OperationClass.ATTENTION_DECODE if tokens == 1 else OperationClass.ATTENTION_PREFILL
    # Keys and values are read once a row by a fused kernel; with one new token that is all there is to read.
    read = rows * (2 * key_value * context + 2 * query * tokens)
    yield Operation(kind, 4 * total * query * context, element_bytes * read, 2)
    # Norms and residual sums read and write the hidden state, rotary embeddings the heads, SwiGLU its inputs.
    moved = (2 * shape.norms_per_layer + 6) * hidden + 2 * (query + key_value) + 3 * intermediate
    yield Operation(OperationClass.ELEMENTWISE, bytes=element_bytes * total * moved, messages=12)


def head_forward(shape: ModelShape, tp: int, element_bytes: float, tokens: float) -> Operation:
    """What stands on top of the last layer, over ``tokens`` tokens: logits, or one score each."""
    width = 1.0 if shape.head is Head.SCORE else shape.vocab / tp
    moved = shape.hidden * width + tokens * (shape.hidden + 2 * width)
    return Operation(OperationClass.LOGITS, 2 * tokens * shape.hidden * width, element_bytes * moved, 6)


def optimizer_step(elements: float, parameter_bytes: float, optimizer_bytes: float) -> Operation:
    """One Adam step: reads the gradient, reads and writes the parameter and the optimizer tensors."""
    moved = elements * (3 * parameter_bytes + 2 * optimizer_bytes)
    return Operation(OperationClass.OPTIMIZER, 12 * elements, moved, 4)
