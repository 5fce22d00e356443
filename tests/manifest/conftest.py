from hypothesis import settings

# Shared machines stall; a slow example is not a failure.
settings.register_profile("kvport", deadline=None)
settings.load_profile("kvport")
