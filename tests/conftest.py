"""Property tests draw the same examples at every run: a red run means a change, not luck."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
