"""Going on with a run: which checkpoint, what was changed since, and everything back in its place."""
