"""Fixtures that are dear: one pool of ranks for the whole session."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import RankPool

_pools: dict[int, RankPool] = {}


@pytest.fixture
def ranks() -> RankPool:
    """Eight gloo ranks. A pool in which a test failed is replaced."""
    pool = _pools.get(8)
    if pool is None or not pool.alive:
        pool = _pools[8] = RankPool(8)
    return pool


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the pool when everything is imported and no tensor has been made yet."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        _pools[8] = RankPool(8)


def pytest_sessionfinish() -> None:
    for pool in _pools.values():
        pool.close()
