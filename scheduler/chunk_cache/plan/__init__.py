"""What happens to every token of a prompt: RecomputePlan, and what it is made from."""
