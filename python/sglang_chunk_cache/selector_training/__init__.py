"""Training of the small model that selects (CacheClip section 3.5)."""
