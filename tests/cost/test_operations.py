import pytest

from lightning_nereus.cost import Calibration, LinkType, Operation, OperationClass
from lightning_nereus.cost.latency import LAUNCH_SECONDS, Rates
from lightning_nereus.cost.operations import collective, layer_forward
from tests.cost.jobs import ACTOR, cluster


def test_time_is_the_slower_of_compute_and_memory_plus_launches():
    rates = Rates(cluster(), Calibration())
    # 0.45 of 100 TFLOP/s against 0.45 of 2 TB/s.
    assert rates.seconds(Operation(OperationClass.GEMM, flops=45e12)) == pytest.approx(1.0)
    assert rates.seconds(Operation(OperationClass.GEMM, flops=1.0, bytes=0.9e12)) == pytest.approx(1.0)
    assert rates.seconds(Operation(OperationClass.GEMM, messages=3)) == pytest.approx(3 * LAUNCH_SECONDS)


def test_ring_all_reduce_sends_twice_the_share_of_the_others():
    operation = collective(OperationClass.ALL_REDUCE, LinkType.INTRA, 4, 1000.0)
    assert (operation.bytes, operation.messages) == (1500.0, 6)
    gathered = collective(OperationClass.ALL_GATHER, LinkType.INTER, 4, 1000.0)
    assert (gathered.bytes, gathered.messages) == (750.0, 3)
    assert collective(OperationClass.BROADCAST, LinkType.INTRA, 1, 1000.0).bytes == 0
    assert gathered.key == "all_gather.inter"
    rates = Rates(cluster(), Calibration())
    assert rates.seconds(gathered) == pytest.approx(750 / (10e9 * 0.6) + 3 * 2e-5)


def test_gemm_flops_of_a_layer_are_two_for_each_weight_and_token():
    gemm = next(iter(layer_forward(ACTOR, 1, 4, rows=3, tokens=5, context=2.5)))
    weights = ACTOR.layer_parameters - 2 * ACTOR.hidden
    assert gemm.flops == 2 * 15 * weights
    halves = next(iter(layer_forward(ACTOR, 2, 4, rows=3, tokens=5, context=2.5)))
    assert halves.flops == gemm.flops / 2


def test_decode_attention_reads_the_cache():
    _, attention, _ = layer_forward(ACTOR, 1, 4, rows=2, tokens=1, context=100)
    assert attention.kind is OperationClass.ATTENTION_DECODE
    cache = 2 * 2 * 100 * ACTOR.kv_heads * ACTOR.head_dim * 4
    assert attention.bytes == pytest.approx(cache + 2 * 2 * ACTOR.heads * ACTOR.head_dim * 4)
