"""The runtime inside a trainer: keys, the noise source and the stream. No solver in it."""

from mmfact.noise.key import NoiseKey
from mmfact.noise.model import ModelNoise
from mmfact.noise.release import Shard
from mmfact.noise.stream import NoiseStream

__all__ = ["ModelNoise", "NoiseKey", "NoiseStream", "Shard"]
