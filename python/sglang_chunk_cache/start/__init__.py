"""How a server starts: flags checked, hooks applied, the parts put together, the model checked."""
