"""What holds for every test."""

from hypothesis import settings

# How long one example takes says more of the machine's load than of the code; each test has a time limit as a whole.
settings.register_profile("meshrl", deadline=None)
settings.load_profile("meshrl")
