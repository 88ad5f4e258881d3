"""Marked texts, and the token ids and spans that become of them."""
