"""The rule of admission: a saving that pays back within its share of the horizon (paper Eq. 2)."""

import pytest

from lightning_nereus.control.admission import admit


@pytest.mark.parametrize(
    ("saving", "cost", "horizon", "gamma", "admitted"),
    [
        (1.0, 5.0, 10.0, 0.5, True),
        (1.0, 5.1, 10.0, 0.5, False),
        (0.0, 0.0, 10.0, 0.5, False),
        (-1.0, 0.1, 10.0, 0.5, False),
        (1.0, 0.0, 1.0, 0.5, True),
    ],
)
def test_admission(saving, cost, horizon, gamma, admitted):
    verdict = admit(saving, cost, horizon, gamma)
    assert verdict.admitted is admitted
    assert verdict.reason
