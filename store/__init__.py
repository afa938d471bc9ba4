"""Artifacts on disk: HDF5 files, digests, atomic publication, refs."""
