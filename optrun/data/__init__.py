"""Sources of examples, and their order."""
