from hypothesis import HealthCheck, settings

# Shared machines stall, and mutants of whole artifacts are large: neither is a failure.
settings.register_profile(
    "kvport", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvport")
