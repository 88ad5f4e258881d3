"""A fused batch: its arrays, its parts, and how each of them attends."""
