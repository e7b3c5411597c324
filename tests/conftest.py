"""Property tests take the same examples every time, and no machine is too slow for them."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "stepwell", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("stepwell")
