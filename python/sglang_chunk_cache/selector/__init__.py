"""The selector: a small auxiliary model, in a process of its own on the CPU, that scores chunk tokens (CacheClip).

`selector_client` asks it, in the process that tokenizes; `__main__` is the selector's own process.
"""
