"""All that a package with a rule needs to test: fedstrata's checks, and numbers worked out by hand."""

import numpy as np
from ida_rule import IDA

from fedstrata import Algorithm, Server, check_rule


def test_the_rule() -> None:
    """All checks that fedstrata has for a weighting."""
    check_rule(IDA())


def test_by_hand() -> None:
    """The clients 0, 1 and 5 have the mean 2 and the distances 2, 1 and 3: 1/2 : 1 : 1/3 are 3 : 6 : 2 of 11."""
    server = Server({"w": np.zeros(1)}, Algorithm(weighting=IDA(epsilon=1e-12)))
    new = server.aggregate([{"w": np.array([at])} for at in (0.0, 1.0, 5.0)], sizes=[1, 1, 1])
    np.testing.assert_allclose(new["w"], (0 * 3 + 1 * 6 + 5 * 2) / 11)
