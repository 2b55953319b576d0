"""Pool traces: real ones, what happens between nodes and devices, and what is refused."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nereus.errors import ConfigurationError
from lightning_nereus.simulate.traces import PoolTrace

SHIPPED = Path(str(files("lightning_nereus.simulate").joinpath("excerpts/p3_us_east.csv")))
WHOLE = Path(__file__).parents[3] / "shared" / "data" / "spot" / "p3-trace.csv"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_shipped_excerpt_loses_two_devices_and_gets_two_back():
    trace = PoolTrace.read(SHIPPED, 8, seconds_per_step=60, start_seconds=1440)
    assert trace.changes == (
        (0, tuple(range(8))),
        (10, (0, 1, 3, 4, 6, 7)),
        (19, tuple(range(8))),
    )
    assert trace.devices_at(9) == tuple(range(8))
    assert trace.devices_at(10) == trace.devices_at(18) == (0, 1, 3, 4, 6, 7)
    assert trace.devices_at(500) == tuple(range(8))


@pytest.mark.skipif(not WHOLE.exists(), reason="the whole trace is not on this machine")
def test_the_shipped_excerpt_is_part_of_the_whole_trace():
    lines = WHOLE.read_text().splitlines()
    assert set(SHIPPED.read_text().splitlines()) <= set(lines)


@pytest.mark.skipif(not WHOLE.exists(), reason="the whole trace is not on this machine")
@pytest.mark.parametrize("devices", [8, 32])
def test_the_whole_trace_gives_as_many_devices_as_nodes(devices: int):
    trace = PoolTrace.read(WHOLE, devices, seconds_per_step=60)
    count, by_second = 0, {}
    for line in WHOLE.read_text().splitlines():
        milliseconds, action, _ = line.split(",")
        count += 1 if action == "add" else -1
        by_second[float(milliseconds) / 1000] = count
    for step in range(0, 700, 7):
        nodes = [n for second, n in by_second.items() if second <= step * 60][-1]
        assert len(trace.devices_at(step)) == min(nodes, devices)


def test_a_node_that_waits_takes_the_place_of_one_that_leaves(tmp_path: Path):
    path = write(tmp_path / "t.csv", "0,add,a\n0,add,b\n0,add,c\n5000,remove,a\n9000,remove,b\n")
    trace = PoolTrace.read(path, 2, seconds_per_step=1)
    assert trace.changes == ((0, (0, 1)), (9, (0,)))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=20), st.integers(1, 4))
def test_a_device_is_never_held_by_two_nodes(tmp_path_factory, moves, devices):
    present: set[int] = {0}
    lines, now = ["0,add,n0"], 0
    for wait, node in moves:
        now += wait * 1000
        lines.append(f"{now},{'remove' if node in present else 'add'},n{node}")
        present ^= {node}
    trace = PoolTrace.read(write(tmp_path_factory.mktemp("t") / "t.csv", "\n".join(lines)), devices, 1)
    for _, pool in trace.changes:
        assert len(set(pool)) == len(pool) <= devices
    assert len(trace.devices_at(10**6)) == min(devices, len(present))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,add,a\nhello\n", "line 2 of .* is 'hello'"),
        ("0,add,a\nsoon,add,b\n", "line 2"),
        ("0,add,a\n5,lose,a\n", "action 'lose'"),
        ("0,add,a\n5,add,a\n", "a is there already"),
        ("0,add,a\n5,remove,b\n", "b is not there"),
        ("0,add,a\n9,add,b\n5,add,c\n", "line 3 .* back in time"),
        ("0,add,a\n4000,remove,a\n", "pool of zero devices at step 4"),
        ("5000,add,a\n", "no device at second 0"),
        ("", "no device at second 0"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, words: str):
    with pytest.raises(ConfigurationError, match=words):
        PoolTrace.read(write(tmp_path / "t.csv", text), 8, seconds_per_step=1)


def test_settings_that_make_no_sense(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PoolTrace.read(tmp_path / "missing.csv", 8, seconds_per_step=1)
    with pytest.raises(ConfigurationError, match="seconds_per_step"):
        PoolTrace.read(SHIPPED, 8, seconds_per_step=0)
    with pytest.raises(ConfigurationError, match=r"trace\.devices"):
        PoolTrace.read(SHIPPED, 0, seconds_per_step=1)
