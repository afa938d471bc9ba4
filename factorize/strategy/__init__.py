"""Strategies: what an artifact holds and the runtime streams. One protocol, one file each."""
