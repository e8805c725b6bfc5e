"""Property tests: the same examples in every run, and no failure because a machine was busy."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
