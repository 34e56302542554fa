"""Shared by all tests: Hypothesis without a deadline, because this suite runs on small and busy machines."""

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("suite")
