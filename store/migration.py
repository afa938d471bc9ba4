"""Artifacts of earlier format versions, written again in the newest one."""

from __future__ import annotations

from mmfact.store import format
from mmfact.store.artifact import SCHEMA_VERSION, Artifact
from mmfact.store.store import ArtifactStore


def migrated_ref(ref: str) -> str:
    """The ref that a migrated artifact gets unless another is chosen."""
    return f"{ref}-v{SCHEMA_VERSION}"


def migrate(store: ArtifactStore, ref: str, name: str | None = None) -> Artifact | None:
    """Write what `ref` names in the newest version of the format, under the ref `name`.

    The old artifact and its ref stay: runs that began with it ask for its digest when they resume. Earlier versions are
    read for ever, so nobody has to migrate; readers that know the newest version only may be glad of it.

    Parameters
    ----------
    name : str, optional
        Default: `migrated_ref`.

    Returns
    -------
    Artifact or None
        None if `ref` has the newest version already, or was migrated to `name` before.

    Raises
    ------
    ArtifactNotFound, ArtifactCorrupt, ArtifactVersionError
        `ref` cannot be read.
    RefError
        `name` is not allowed, or names something else.
    StoreError
        The file system failed.
    """
    artifact = store.load(ref)
    if artifact.schema_version == SCHEMA_VERSION:
        return None
    made, name = format.renewed(artifact), migrated_ref(ref) if name is None else name
    if store.has(name) and not store.lost(name) and store.load(name).digest == made.digest:
        return None
    return store.publish(made, name)
