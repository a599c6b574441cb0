"""How Hypothesis runs: no example is timed, here or where its own profile for CI draws the same examples each time."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
