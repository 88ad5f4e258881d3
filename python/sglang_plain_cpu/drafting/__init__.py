"""Speculative decoding in plain torch, where SGLang has kernels only.

SGLang's branches for a CPU are switched on, and these functions stand in the place of the kernels that they call;
`patches.toml` says which in the place of which.
"""
