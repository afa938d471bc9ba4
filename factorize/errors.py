"""Every error that mmfact raises on purpose. Each message names the value, the rule and the way out."""


class MmfactError(Exception):
    """Base of all errors that mmfact raises on purpose."""


class WorkloadError(MmfactError):
    """A workload, schedule or matrix that cannot be compiled as given."""


class SolverError(MmfactError):
    """The optimum, its certificate or a strategy could not be computed safely."""


class CapacityError(MmfactError):
    """The request would take more memory than its form allows; raised before allocating."""


class PrivacyError(MmfactError):
    """A privacy parameter (epsilon, delta, noise multiplier, clip norm) outside its range."""


class ParticipationError(PrivacyError):
    """An example takes part more often than the artifact's schema allows."""


class AdapterError(MmfactError):
    """A model, optimizer or optional package that an adapter cannot work with."""


class ProjectorError(MmfactError):
    """Public gradients, a number of vectors, or a gradient to project that do not fit a projector."""


class ArtifactError(MmfactError):
    """Base of the store's errors."""


class ArtifactNotFound(ArtifactError):  # noqa: N818 - the name that design.md gives
    """No artifact under that ref, digest or path."""


class ArtifactCorrupt(ArtifactError):  # noqa: N818
    """The file is damaged, foreign, or says something that its content denies.

    Attributes
    ----------
    reason : str
        What is wrong with it, without its name and what to do; "" if nothing is known.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ArtifactVersionError(ArtifactError):
    """The file was written in a format that this version cannot read."""


class ProjectorStale(ArtifactError):  # noqa: N818
    """A cached projector that depends on something else than what is asked for."""


class RefError(ArtifactError):
    """A ref name that is not allowed, or that already names another artifact."""


class StoreError(ArtifactError):
    """The machine failed the store: no space, no permission, not a directory."""


class HorizonError(MmfactError):
    """A step at or past the horizon that the artifact was compiled for."""


class StateError(MmfactError):
    """A stream state that belongs to another run, key, artifact, shape or version."""
