"""Shards: any split of the elements gives the rows of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.noise.source import LARGEST_ROW

TOTAL = 150


@settings(max_examples=50)
@given(
    cuts=st.sets(st.integers(1, TOTAL - 1), max_size=6),
    space=st.sampled_from(["gradient", "iterate"]),
    dtype=st.sampled_from(["float32", "float64"]),
    blocks=st.lists(st.integers(1, TOTAL + 1), min_size=7, max_size=7),
)
def test_any_split_equals_the_whole(
    cuts: set[int], space: str, dtype: str, blocks: list[int], case: Any, stream: Any, rows_of: Any
) -> None:
    """Sharded trainers (FSDP) draw their own elements only; the noise must be that of one machine, odd offsets too.

    Each machine with blocks and threads of its own.
    """
    artifact = case("momentum", n=4).artifact
    whole = stream(artifact, TOTAL, space=space, dtype=dtype)
    edges, rows = [0, *sorted(cuts), TOTAL], []
    for (a, b), block in zip(itertools.pairwise(edges), blocks, strict=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mmfact.noise.stepping.BLOCK", block)
            options = {"run": whole.run, "space": space, "dtype": dtype, "threads": 1 + block % 4}
            rows.append(rows_of(stream(artifact, b - a, offset=a, total=TOTAL, **options)))
    np.testing.assert_array_equal(np.concatenate(rows, axis=1), rows_of(whole))


@pytest.mark.parametrize("offset", [1, 3, 7, 9, 15, 2**16 - 1, 2**16 + 1])
def test_single_elements_at_odd_offsets(offset: int, stream: Any) -> None:
    """One element alone is that element of the whole, across keystream blocks and working blocks."""
    whole = stream(size=2**16 + 10)
    one = stream(size=1, offset=offset, total=2**16 + 10, run=whole.run)
    assert one.next()[0] == whole.next()[offset]


def test_total_is_only_a_limit(stream: Any, rows_of: Any) -> None:
    """Elements do not move when the vector they belong to is said to be longer."""
    one = stream(total=8)
    np.testing.assert_array_equal(rows_of(stream(total=1000, run=one.run)), rows_of(one))


def test_the_last_elements_of_the_longest_vector(stream: Any, rows_of: Any) -> None:
    """At the end of the keystream shards still agree, and differ from the start."""
    end, start = stream(offset=LARGEST_ROW - 8), stream(run=bytes(16))
    tail = stream(size=3, offset=LARGEST_ROW - 3, run=end.run)
    rows = rows_of(end)
    np.testing.assert_array_equal(rows_of(tail), rows[:, 5:])
    assert not np.isin(rows, rows_of(start)).any()
