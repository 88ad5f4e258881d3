"""Speculative decoding in plain torch, where SGLang has kernels only.

SGLang's branches for a CPU are switched on, and the functions here replace the kernels that these branches call;
`patches.toml` says which function replaces which kernel.
"""
