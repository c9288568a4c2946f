"""Ways to compute one step: which there are, which is taken, and those that are faster than the loops."""
