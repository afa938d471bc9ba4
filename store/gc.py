"""Garbage collection: what killed writers and removed refs have left in a store."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from mmfact.factorize.errors import StoreError
from mmfact.store.publish import TEMPORARY_PREFIX
from mmfact.store.store import ASIDE, QUARANTINE, ArtifactStore

DEFAULT_AGE = 24.0  # hours: no writer takes that long


@dataclass(frozen=True)
class Garbage:
    """What was removed, or would be.

    Attributes
    ----------
    leftovers : tuple of str
        Files that killed writers left half written.
    unnamed : tuple of str
        Artifacts that no ref names.
    size : int
        Bytes of both.
    quarantined : tuple of str
        Damaged artifacts; they are never removed.
    """

    leftovers: tuple[str, ...]
    unnamed: tuple[str, ...]
    size: int
    quarantined: tuple[str, ...]


def collect(store: ArtifactStore, *, older_than: float = DEFAULT_AGE, dry_run: bool = False) -> Garbage:
    """Remove the leftovers of killed writers, and artifacts that no ref names.

    Other processes may go on using the store, and saving what is about to be removed.

    Parameters
    ----------
    older_than : float
        Hours. What is younger may be a writer at work, and stays.
    dry_run : bool
        Only say what would be removed.

    Raises
    ------
    StoreError
        The store is protected, its file system failed, or `older_than` is negative.
    ArtifactCorrupt
        A ref is damaged: what it named must not be taken for garbage. Nothing is removed.
    """
    if not older_than >= 0:
        raise StoreError(f"older_than = {older_than!r} hours must be at least 0, the age of what may be removed")
    if not dry_run:
        store.check_removable()
    folder, before, named = store.folder, time.time() - 3600 * older_than, store.named()
    leftovers, unnamed, size = [], [], 0

    def old(name: str) -> int | None:
        """The bytes of a file that is old enough."""
        with contextlib.suppress(FileNotFoundError):
            found = folder.stat(name)
            if found.modified <= before:
                return found.size
        return None

    for below in ("", "refs/"):
        for name in folder.names(below.rstrip("/")):
            if not name.startswith(TEMPORARY_PREFIX) or (bytes_ := old(below + name)) is None:
                continue
            if not dry_run:
                with contextlib.suppress(FileNotFoundError):
                    if name.startswith(ASIDE):
                        if not store.finish_discard(name):
                            continue
                    else:
                        folder.remove(below + name)
            leftovers.append(below + name)
            size += bytes_
    for name in store.files():
        if name in named or (bytes_ := old(name)) is None:
            continue
        if dry_run or store.discard(name):
            unnamed.append(name)
            size += bytes_
    return Garbage(tuple(leftovers), tuple(unnamed), size, tuple(folder.names(QUARANTINE)))
