"""What all attacks share: how one is declared, and what it has to be refused with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactError


@dataclass(frozen=True)
class Attack:
    """One crafted file.

    Attributes
    ----------
    build : callable
        Makes (bytes, logical digest of the name it comes under, or None).
    words : str
        A regular expression that the refusal has to match; no other attack's refusal is in the same words.
    error : type
        Of the refusal.
    """

    build: Callable[[], tuple[bytes, str | None]]
    words: str
    error: type[ArtifactError]


ATTACKS: dict[str, Attack] = {}


def attack(
    words: str, error: type[ArtifactError] = ArtifactCorrupt
) -> Callable[[Callable[[], tuple[bytes, str | None]]], Callable[[], tuple[bytes, str | None]]]:
    """Declare a generator; its name is the attack's."""

    def declare(build: Callable[[], tuple[bytes, str | None]]) -> Callable[[], tuple[bytes, str | None]]:
        name = build.__name__.replace("_", " ")
        if name in ATTACKS:
            raise ValueError(f"two attacks are named {name!r}")
        ATTACKS[name] = Attack(build, words, error)
        return build

    return declare
