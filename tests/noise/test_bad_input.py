"""Bad input: one clear error of ours before anything is drawn or allocated."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import CapacityError, PrivacyError, StateError
from mmfact.noise.source import LARGEST_ROW


@pytest.mark.parametrize("what", ["noise_multiplier", "clip_norm"])
@pytest.mark.parametrize(
    "value",
    [
        0,
        0.0,
        -0.0,
        -1,
        float("nan"),
        float("inf"),
        -float("inf"),
        "one",
        "",
        None,
        [],
        1j,
        np.array([1.0, 2.0]),
        10**400,
        "1.0",
        True,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_sigma_and_clip_norm_are_positive_and_finite(what: str, value: Any, stream: Any) -> None:
    """Zero noise, or noise of unknown size, must never look like a run."""
    with pytest.raises(PrivacyError, match=what.replace("_", " ")):
        stream(**{what: value})


@pytest.mark.parametrize("value", [1, 1.5, np.float32(0.5), np.float64(2), np.int64(3)])
def test_any_positive_number_is_a_sigma(value: Any, stream: Any) -> None:
    """And it is kept as a plain float, so that the state is plain JSON."""
    made = stream(noise_multiplier=value, clip_norm=value)
    assert type(made.state_dict()["noise_multiplier"]) is float
    assert made.noise_multiplier == made.clip_norm == float(value)


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-200, "float64"), (1e-152, "float64"), (1e-30, "float32"), (1e-20, "float32")]
)
def test_noise_that_vanishes_is_refused(scale: float, dtype: str, stream: Any) -> None:
    """sigma and clip norm are positive, each; their product is zero or a denormal: no noise, or noise on a grid."""
    with pytest.raises(PrivacyError, match="cannot hold"):
        stream(noise_multiplier=scale, clip_norm=scale, dtype=dtype)


@pytest.mark.parametrize(("scale", "dtype"), [(1e200, "float64"), (1e154, "float64"), (1e30, "float32")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_that_is_not_finite_is_refused(scale: float, dtype: str, stream: Any) -> None:
    """Infinite rows destroy the model, without an error."""
    with pytest.raises(PrivacyError, match="cannot hold"):
        stream(noise_multiplier=scale, clip_norm=scale, dtype=dtype)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-12, "float32"), (1e15, "float32"), (1e-100, "float64")])
def test_unusual_units_are_no_reason_to_refuse(scale: float, dtype: str, stream: Any, rows_of: Any) -> None:
    """Gradients in another unit: noise is the same but for the unit."""
    rows = rows_of(stream(clip_norm=0.7 * scale, dtype=dtype, run=bytes(16)))
    np.testing.assert_allclose(rows / scale, rows_of(stream(dtype=dtype, run=bytes(16))), rtol=1e-6)


@pytest.mark.parametrize("size", [0, -1, True, False, 2.5, 8.0, "8", None, [8], float("nan"), np.float64(8)])
def test_a_size_is_a_whole_number_of_at_least_one(size: Any, stream: Any) -> None:
    """True is not one element, 2.5 not two."""
    with pytest.raises(StateError, match="size"):
        stream(size=size)


def test_numpy_integers_are_whole_numbers(stream: Any) -> None:
    """Shapes often come as numpy integers."""
    made = stream(size=np.int64(8), offset=np.int32(4), total=np.uint16(12))
    assert made.next().shape == (8,)
    assert type(made.state_dict()["size"]) is int


@pytest.mark.parametrize("size", [10**15, 2**62, 10**30, LARGEST_ROW + 1])
def test_an_absurd_size_is_refused_before_allocating(size: int, stream: Any) -> None:
    """A typing error must not bring the machine down."""
    stream()
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError):
            stream(size=size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_size_beyond_the_machine_says_how_much_and_what_to_do(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 1 MiB (so simulated) a row of 10^6 elements is refused."""
    stream()
    monkeypatch.setattr("mmfact.noise.stream.os.sysconf", lambda name: 1024)
    with pytest.raises(CapacityError, match=r"GiB.*shards"):
        stream(size=10**6)
    assert stream(size=100).next().shape == (100,)


@pytest.mark.parametrize(
    "placing",
    [
        {"offset": -1},
        {"offset": True},
        {"offset": 1.5},
        {"offset": "1"},
        {"offset": None},
        {"total": 7},
        {"total": 0},
        {"total": -8},
        {"total": True},
        {"total": 8.0},
        {"total": "8"},
        {"offset": 1, "total": 8},
        {"offset": 8, "total": 8},
        {"offset": 10**15, "total": 8},
    ],
    ids=repr,
)
def test_a_shard_outside_its_vector_is_refused(placing: dict[str, Any], stream: Any) -> None:
    """A shard that hangs over the end would overlap with another tensor's plan of elements."""
    with pytest.raises(StateError):
        stream(size=8, **placing)


@pytest.mark.parametrize("placing", [{"offset": LARGEST_ROW - 7}, {"total": LARGEST_ROW + 1}, {"offset": 10**30}])
def test_elements_beyond_the_keystream_are_refused(placing: dict[str, Any], stream: Any) -> None:
    """Beyond 2^35 elements the block counter would wrap and noise repeat within a row."""
    with pytest.raises(CapacityError, match="keystream"):
        stream(size=8, **placing)


@pytest.mark.parametrize("dtype", ["float16", np.float16, "half", "bfloat16"])
def test_half_precision_is_refused_with_the_reason(dtype: Any, stream: Any) -> None:
    """Noise on the grid of a half-precision type betrays the gradient."""
    with pytest.raises(StateError, match="grid"):
        stream(dtype=dtype)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "object", "S8", "nonsense", np.longdouble, 5, ""])
def test_other_dtypes_are_refused(dtype: Any, stream: Any) -> None:
    """Noise is drawn in float32 or float64."""
    with pytest.raises(StateError, match="float32 or float64"):
        stream(dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "f4", np.float32, np.dtype("float32"), ">f4"])
def test_spellings_of_a_dtype_give_the_same_noise(dtype: Any, stream: Any, rows_of: Any) -> None:
    """The dtype is part of the key derivation: two spellings must not be two streams, nor byte order show."""
    made = stream(dtype=dtype, run=bytes(16))
    rows = rows_of(made)
    assert rows.dtype == np.float32
    assert made.state_dict()["dtype"] == "float32"
    np.testing.assert_array_equal(rows, rows_of(stream(run=bytes(16))))


@pytest.mark.parametrize("space", ["", "Gradient", "both", None, 0, [], b"gradient"])
def test_another_space_is_refused(space: Any, stream: Any) -> None:
    """Gradient noise in iterate space is the wrong noise."""
    with pytest.raises(StateError, match="gradient or iterate"):
        stream(space=space)


@pytest.mark.parametrize(
    "run",
    [
        b"",
        bytes(15),
        bytes(17),
        bytes(32),
        16,
        "a" * 16,
        5.0,
    ],
    ids=repr,
)
def test_a_run_of_another_length_or_type_is_refused(run: Any, stream: Any) -> None:
    """A run number is no nonce: two machines that count their runs from 16 would share their noise."""
    with pytest.raises(StateError, match="16 bytes"):
        stream(run=run)


@pytest.mark.parametrize("wrong", [b"k" * 32, "key", 5])
def test_what_is_no_key_is_refused(wrong: Any, stream: Any) -> None:
    """Raw bytes are easily taken for a key; the message should name NoiseKey.from_bytes."""
    with pytest.raises(StateError, match="NoiseKey"):
        stream(key=wrong)


@pytest.mark.parametrize("name", ["\ud800", "w\udfff", None, 5, b"w", ["w"]], ids=repr)
def test_a_name_is_text(name: Any, stream: Any) -> None:
    """No name that cannot be written down, and no None taken for a tensor called 'None'."""
    with pytest.raises(StateError, match="name"):
        stream(name=name)


def test_options_are_given_by_name(case: Any, key: Any) -> None:
    """stream(artifact, size, 1.0, 0.5) would leave open which is sigma."""
    from mmfact.noise import NoiseStream

    with pytest.raises(TypeError):
        NoiseStream(case("momentum").artifact, 8, 1.0, 0.5, key)  # type: ignore[misc]
