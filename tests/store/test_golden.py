"""Files of earlier versions: whatever the format becomes, these must be read, with the numbers they hold."""

from pathlib import Path

import numpy as np
import pytest

from mmfact.factorize.verification import verify
from mmfact.store.store import ArtifactStore

GOLDEN = ArtifactStore(Path(__file__).parents[2] / "artifacts" / "golden")


def test_there_is_one_for_each_strategy():
    of_version_1 = {"v1-dense-momentum", "v1-dense-custom-float32"}
    of_version_2 = {
        "v2-buffered-momentum",
        "v2-buffered-custom-float64",
        "v2-banded-low-rank-momentum",
        "v2-banded-prefix-sum-float64",
        "v2-dense-momentum",
    }
    assert of_version_1 | of_version_2 <= set(GOLDEN.refs())


@pytest.mark.parametrize("ref", GOLDEN.refs())
def test_reads_and_verifies(ref):
    """Certificate, coefficients and workload agree with each other by means that share nothing with the compiler."""
    artifact = GOLDEN.load(ref)
    assert verify(
        artifact.workload, artifact.strategy, artifact.multipliers, artifact.certificate, reference=True
    ).passed


def test_what_they_were_made_from():
    """The inputs, as they were typed when the files were made."""
    made = GOLDEN.load("v1-dense-momentum").workload
    assert (made.kind, made.n, made.beta, made.weight_decay, made.schedule) == ("momentum", 8, 0.9, 0.01, "cooldown")
    np.testing.assert_array_equal(made.learning_rates, [1, 1, 1, 1, 1, 1, 1, 0.05])
    matrix = np.tril(np.arange(1.0, 17).reshape(4, 4)) + 4 * np.eye(4)
    np.testing.assert_array_equal(GOLDEN.load("v1-dense-custom-float32").A, matrix)
    made = GOLDEN.load("v2-buffered-momentum")
    assert (made.workload.weight_decay, made.workload.schedule, made.n) == (0.01, "cooldown", 12)
    assert (made.strategy.kind, made.strategy.buffers, made.strategy.dtype) == ("buffered", 2, np.float32)
    np.testing.assert_array_equal(made.workload.learning_rates[:9], 1)
    custom = GOLDEN.load("v2-buffered-custom-float64")
    np.testing.assert_array_equal(custom.A, np.tril(np.arange(1.0, 26).reshape(5, 5)) + 4 * np.eye(5))
    assert (custom.strategy.buffers, custom.strategy.dtype) == (2, np.float64)
    made = GOLDEN.load("v2-banded-low-rank-momentum")
    assert (made.workload.beta, made.workload.ema) == (0.5, 0.9)
    assert made.strategy.parameters() == {"bandwidth": 3, "rank": 2}
    assert GOLDEN.load("v2-banded-prefix-sum-float64").strategy.parameters() == {"bandwidth": 4, "rank": 0}
