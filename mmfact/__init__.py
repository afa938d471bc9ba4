"""mmfact: optimal correlated noise for differentially private training, with a proof of it.

    import mmfact
    artifact = mmfact.load("momentum-n2048")
    stream = mmfact.NoiseStream(artifact, size, noise_multiplier=1.0, clip_norm=1.0, key=key)

Everything is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mmfact.factorize.compiler import Options, compile
    from mmfact.factorize.errors import MmfactError
    from mmfact.noise.key import NoiseKey
    from mmfact.noise.model import ModelNoise
    from mmfact.noise.stream import NoiseStream
    from mmfact.store.artifact import Artifact
    from mmfact.store.store import ArtifactStore, load

_HOMES = {
    "Artifact": "mmfact.store.artifact",
    "ArtifactStore": "mmfact.store.store",
    "MmfactError": "mmfact.factorize.errors",
    "ModelNoise": "mmfact.noise.model",
    "NoiseKey": "mmfact.noise.key",
    "NoiseStream": "mmfact.noise.stream",
    "Options": "mmfact.factorize.compiler",
    "compile": "mmfact.factorize.compiler",
    "load": "mmfact.store.store",
}

__all__ = [
    "Artifact",
    "ArtifactStore",
    "MmfactError",
    "ModelNoise",
    "NoiseKey",
    "NoiseStream",
    "Options",
    "__version__",
    "compile",
    "load",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmfact' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
