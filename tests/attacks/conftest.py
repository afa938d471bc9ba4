"""What the tests of this folder start from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attacks import forgery
from attacks.forgery import Forger
from mmfact.store.artifact import Artifact


@pytest.fixture(scope="session")
def forger() -> Forger:
    return forgery.dense()


@pytest.fixture(scope="session")
def forgers() -> dict[str, Forger]:
    """Of the recursive strategies."""
    return {"buffered": forgery.buffered(), "banded-low-rank": forgery.banded()}


@pytest.fixture(scope="session")
def same() -> Callable[[Artifact, Artifact], bool]:
    return forgery.same
