"""Attention of fused batches; every other batch keeps the backend that SGLang chose."""
