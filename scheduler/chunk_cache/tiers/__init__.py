"""What the tiers below the KV pool keep, when a chunk is loaded, and what that costs."""
