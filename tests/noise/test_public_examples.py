"""Public examples: which they are (digests by hashlib of NumPy's bytes), and that none of them is a private one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfact.factorize.errors import ProjectorError

torch = pytest.importorskip("torch")
public_examples = pytest.importorskip("mmfact.noise.public_examples")

check_disjoint, digest, examples = public_examples.check_disjoint, public_examples.digest, public_examples.examples


def numbers(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


# --- which they are --------------------------------------------------------------------------------


def test_features_alone_or_with_targets() -> None:
    features, targets = numbers(4, 3), torch.arange(4)
    assert [one.tolist() for one in examples("public examples", features)] == [features.tolist()]
    for pair in ((features, targets), [features, targets]):
        found = examples("public examples", pair)
        assert [one.tolist() for one in found] == [features.tolist(), targets.tolist()]
    features += 1  # the caller's buffer is used again
    assert not torch.equal(found[0], features)


def test_a_zero_is_a_zero_whatever_its_sign() -> None:
    with pytest.raises(ProjectorError, match="public example 1 is also private example 0"):
        check_disjoint("public example", torch.tensor([[1.0], [0.0]]), "private example", torch.tensor([[-0.0]]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "the public examples must be a tensor"),
        (np.zeros((4, 3)), "must be a tensor"),
        (5, "must be a tensor"),
        (None, "must be a tensor"),
        ("abc", "must be a tensor"),
        ({"features": torch.zeros(3)}, "must be a tensor"),
        (torch.tensor(1.0), "a row for each example"),
        ((torch.zeros(3), 7), "must be a tensor"),
        ((torch.zeros(3, 2), torch.zeros(4)), "have 3 and 4 rows"),
        (torch.zeros(0, 2), "have 0 rows"),
    ],
)
def test_what_are_no_examples(given: Any, words: str) -> None:
    with pytest.raises(ProjectorError, match=words):
        examples("public examples", given)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool"])
def test_digest_is_of_kind_shape_and_bytes(dtype: str) -> None:
    array = (np.arange(12) % 5).reshape(4, 3).astype(dtype)
    expected = hashlib.sha256(f"torch.{dtype} (4, 3)\n".encode() + array.tobytes())
    assert digest([torch.from_numpy(array)]) == expected.hexdigest()
    expected.update(b"torch.int64 (4,)\n" + np.arange(4).tobytes())
    assert digest([torch.from_numpy(array), torch.arange(4)]) == expected.hexdigest()


def test_digests_tell_examples_apart() -> None:
    one = numbers(6, 2)
    changed = one.clone()
    changed.view(torch.int32)[5, 1] ^= 1  # one bit
    sets = [
        [one],
        [one.double()],
        [one.bfloat16()],
        [one.half()],
        [one.reshape(3, 4)],
        [one.flip(0)],
        [one.T],
        [changed],
        [one, one],
        [one, torch.arange(6)],
        [torch.zeros(0)],
        [],
        [torch.zeros(())],
    ]
    assert len({digest(some) for some in sets}) == len(sets)


def test_a_digest_does_not_depend_on_strides_or_grad() -> None:
    one = numbers(6, 4, dtype=torch.bfloat16)
    assert digest([one.T.contiguous().T]) == digest([one]) == digest([one.clone().requires_grad_()])


# --- that none of them is a private one ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
def test_both_are_named(dtype: Any) -> None:
    some = torch.arange(24).reshape(4, 3, 2).to(dtype)
    others = (torch.arange(60).reshape(10, 3, 2) + 100).to(dtype)
    check_disjoint("public example", some, "private example", others)
    others[7] = some[2]
    with pytest.raises(ProjectorError, match=r"public example 2 is also private example 7: .*take it out"):
        check_disjoint("public example", some, "private example", others)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.lists(st.integers(0, 30), max_size=12))
def test_as_sets_say(some: list[int], others: list[int]) -> None:
    rows = {name: torch.tensor([[n, 2 * n] for n in ns]).reshape(-1, 2) for name, ns in (("a", some), ("b", others))}
    if set(some) & set(others):
        first = next(row for row, n in enumerate(others) if n in some)
        with pytest.raises(ProjectorError, match=f"is also b {first}:"):
            check_disjoint("a", rows["a"], "b", rows["b"])
    else:
        check_disjoint("a", rows["a"], "b", rows["b"])


def test_rows_may_come_one_after_the_other_from_anywhere() -> None:
    """A data set that fits no memory; NumPy arrays as well."""
    some, seen = numbers(4, 5), []

    def rows() -> Iterator[Any]:
        for row in range(1000):
            seen.append(row)
            yield numbers(5, seed=1000 + row).numpy()
        yield some[3]
        raise AssertionError("more than was needed")

    with pytest.raises(ProjectorError, match="example 3 is also private example 1000:"):
        check_disjoint("public example", some, "private example", rows())
    assert seen == list(range(1000))


def test_one_differing_bit_is_another_example() -> None:
    some = numbers(3, 5)
    others = some.clone()
    others.view(torch.int32)[:, 4] ^= 1
    check_disjoint("public example", some, "private example", others)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (numbers(9, 5, dtype=torch.float64), "example 0 is torch.float64 of .*, the public example torch.float32"),
        (numbers(9, 1, 5), "of shape .1, 5."),
        (numbers(9, 4), "of shape .4,."),
        ([numbers(5, seed=1), numbers(6)], "private example 1 is .*before any augmentation"),
        (np.zeros((2, 5)), "torch.float64"),
    ],
)  # fmt: skip
def test_rows_of_another_form_cannot_be_compared(others: Any, words: str) -> None:
    with pytest.raises(ProjectorError, match=words):
        check_disjoint("public example", numbers(3, 5), "private example", others)
