"""The recursive strategies on disk: what is saved comes back bit for bit, at every size and precision."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, adopt, check, compile
from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.store import format

HERE = Path("artifact.h5")
N = 12

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])
recursive = pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank"])
strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])


def workloads(n: int) -> dict[str, workload.Workload]:
    rates = np.geomspace(1, 0.1, n)
    matrix = np.tril(np.random.default_rng(5).uniform(0.1, 1, (n, n))) + np.eye(n)
    return {
        "prefix-sum": workload.prefix_sum(n),
        "momentum": workload.momentum(n),
        "coupled": workload.momentum(n, learning_rates=rates, weight_decay=0.01),
        "decoupled": workload.momentum(n, learning_rates=rates, weight_decay=0.01, weight_decay_kind="decoupled"),
        "ema": workload.sgd(n, learning_rates=rates, ema=0.8),
        "custom": workload.custom(matrix),
    }


def content(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """(spec, arrays) of a file, by h5py alone."""
    with h5py.File(io.BytesIO(data)) as file:
        arrays = {name: file[name][...] for name in file}
    return json.loads(arrays.pop("spec").tobytes()), arrays


@strategies
@both_dtypes
@pytest.mark.parametrize("name", list(workloads(2)))
def test_save_and_load_are_equal_bit_for_bit(store, same, strategy, dtype, name):
    """A coefficient changed on its way to disk would make the certificate speak of another strategy."""
    made = compile(workloads(N)[name], Options(strategy=strategy, dtype=dtype, tolerance=1e-2))
    saved = store.save(made, "ref")
    loaded = store.load("ref")
    assert same(saved, loaded)
    assert type(loaded.strategy) is type(made.strategy)
    assert loaded.strategy.dtype == dtype
    assert loaded.strategy.parameters() == made.strategy.parameters()
    for key, array in made.strategy.coefficients().items():
        assert loaded.strategy.coefficients()[key].tobytes() == array.tobytes()
    np.testing.assert_array_equal(loaded.C, made.strategy.to_dense())
    assert loaded.strategy.sensitivity(loaded.participation) == loaded.certificate.sensitivity
    assert store.save(made, "again").path == saved.path


@strategies
@both_dtypes
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["prefix-sum", "ema", "custom"])
def test_the_shortest_horizons(store, same, strategy, dtype, n, name):
    """Also where nothing is left for a rank, so that two of the arrays are empty."""
    saved = store.save(compile(workloads(n)[name], Options(strategy=strategy, dtype=dtype)), "ref")
    assert same(saved, store.load("ref"))


@both_dtypes
def test_a_band_as_wide_as_the_matrix(store, same, dtype):
    """`--bandwidth N` is allowed; the rank is then 0."""
    made = compile(workload.momentum(N), Options(strategy="banded-low-rank", bandwidth=N, dtype=dtype))
    assert made.strategy.rank == 0
    assert same(store.save(made, "ref"), store.load("ref"))


@both_dtypes
def test_a_large_one(same, dtype):
    """n = 20,000 with 7 buffers: several chunks, the last one not full. Made up, for the format does not mind."""
    n, r = 20_000, 7
    random = np.random.default_rng(1)
    c = random.uniform(0.5, 1, n).astype(dtype)
    g, decay, q = (random.uniform(0, 0.4, (n, r)).astype(dtype) for _ in range(3))
    strategy = BufferedStrategy(c, g, decay, q)
    base = format.from_factorization(compile(workload.prefix_sum(N), Options(tolerance=1e-2)))
    loss, max_error = strategy.errors(workload.prefix_sum(n), base.participation)
    sensitivity = strategy.sensitivity(base.participation)
    certificate = replace(base.certificate, n=n, sensitivity=sensitivity, loss=loss, max_error=max_error)
    artifact = replace(
        base,
        workload=workload.prefix_sum(n),
        multipliers=random.uniform(0.1, 1, n),
        strategy=strategy,
        certificate=certificate,
    )
    data = format.encode(artifact)
    assert format.encode(artifact) == data
    spec, arrays = content(data)
    loaded = format.decode(data, HERE)
    object.__setattr__(artifact, "digest", loaded.digest)
    assert same(loaded, artifact)
    assert spec["strategy"] == {"kind": "buffered", "buffers": r}
    assert arrays["strategy.g"].dtype == np.dtype(dtype).newbyteorder("<")
    with h5py.File(io.BytesIO(data)) as file:
        for dataset in file.values():
            assert np.prod(dataset.chunks) <= 1 << 16
            assert dataset.fletcher32 and dataset.shuffle  # noqa: PT018
        assert file["strategy.g"].id.get_num_chunks() > 1


@recursive
def test_equal_content_gives_equal_bytes(strategy):
    """Compiled twice, and from arrays in another memory layout or byte order: one name in the store."""
    options = Options(strategy=strategy, dtype="float64", tolerance=1e-2)
    work = workload.momentum(N)
    made = compile(work, options)
    first = format.encode(format.from_factorization(made))
    assert format.encode(format.from_factorization(compile(work, options))) == first
    other = {k: np.asfortranarray(np.array(v)) for k, v in made.strategy.coefficients().items()}
    again = BufferedStrategy(**other) if strategy == "buffered" else BandedLowRankStrategy(**other, workload=work)
    given = format.encode(format.from_factorization(adopt(work, again, options)))
    same = format.encode(format.from_factorization(adopt(work, made.strategy, options)))
    assert given == same
    read = format.decode(given, HERE)
    for key, array in made.strategy.coefficients().items():
        np.testing.assert_array_equal(read.strategy.coefficients()[key], array)


@strategies
def test_the_spec_says_what_the_format_page_says(strategy):
    """Schema 2: kind and whole-number parameters; each array listed with shape, dtype and SHA-256."""
    made = compile(workload.momentum(N), Options(strategy=strategy, tolerance=1e-2))
    spec, arrays = content(format.encode(format.from_factorization(made)))
    assert spec["schema_version"] == 2
    assert spec["strategy"] == {"kind": strategy, **made.strategy.parameters()}
    held = made.strategy.coefficients()
    assert set(arrays) == {"learning_rates", "multipliers", *(f"strategy.{name}" for name in held)}
    for name, array in arrays.items():
        assert spec["datasets"][name] == {
            "shape": list(array.shape),
            "dtype": array.dtype.str,
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        }
    for name, array in held.items():
        assert arrays[f"strategy.{name}"].shape == array.shape


def test_other_coefficients_are_another_artifact():
    """Strategy, number of buffers, band, rank and precision all show in the digest."""
    work = workload.momentum(N)
    options = [
        {"buffers": 1},
        {"buffers": 2},
        {"buffers": 2, "dtype": "float64"},
        {"strategy": "banded-low-rank", "bandwidth": 2, "rank": 1},
        {"strategy": "banded-low-rank", "bandwidth": 1, "rank": 2},
        {"strategy": "banded-low-rank", "bandwidth": 2, "rank": 2},
        {"strategy": "dense"},
    ]
    digests = {format.from_factorization(compile(work, Options(**o, tolerance=0.5))).digest for o in options}
    assert len(digests) == len(options)


@recursive
def test_loaded_coefficients_cannot_be_changed(store, strategy):
    """A trainer that scales C in place would break the sensitivity."""
    store.save(compile(workload.momentum(N), Options(strategy=strategy, tolerance=1e-2)), "ref")
    for array in store.load("ref").strategy.coefficients().values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2.0


@pytest.mark.parametrize("kind", ["buffered", "dense"])
def test_what_the_spec_may_call_for_fits_the_largest_file(kind):
    """A file is refused unread beyond `LARGEST_FILE`; what may be written must be readable, incompressible too."""
    n, r = 1 << 24, 8
    spec = {"schema_version": 2, "workload": {"kind": "prefix-sum", "n": n}, "strategy": {"kind": kind}}
    names = {"learning_rates", "multipliers", "strategy.packed"}
    if kind == "buffered":
        spec["strategy"]["buffers"] = r
        names = {"learning_rates", "multipliers", "strategy.c", "strategy.g", "strategy.decay", "strategy.q"}
    else:
        spec["workload"] = {"kind": "prefix-sum", "n": 8192}
    spec["datasets"] = {name: {} for name in names}
    shapes = format._shapes(spec, HERE)
    assert 8 * sum(int(np.prod(shape)) for shape in shapes.values()) <= format.LARGEST_FILE


def test_what_the_compiler_takes_on_can_be_stored():
    """n = 2^24, 9 buffers in float32 is 0.6 GiB an array: hours of compiling must not end in a refused file."""
    n, r = 1 << 24, 9
    try:
        check(workload.prefix_sum(n), Options(buffers=r))
    except (CapacityError, WorkloadError):
        return
    spec = {"schema_version": 2, "workload": {"kind": "prefix-sum", "n": n}}
    spec["strategy"] = {"kind": "buffered", "buffers": r}
    names = ("learning_rates", "multipliers", "strategy.c", "strategy.g", "strategy.decay", "strategy.q")
    spec["datasets"] = {name: {} for name in names}
    assert format._shapes(spec, HERE)["strategy.g"] == (n, r)
