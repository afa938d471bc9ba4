"""The runtime inside a trainer: keys, the noise source and the stream. No solver in it."""

from mmfact.noise.key import NoiseKey
from mmfact.noise.stream import NoiseStream

__all__ = ["NoiseKey", "NoiseStream"]
