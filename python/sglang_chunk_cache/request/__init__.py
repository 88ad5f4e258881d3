"""One request: what the chunk cache knows of it, and its reply."""
