"""Which variants of chunks are stored, how well one fits a prompt, and which is evicted first."""
