"""Ways to compute one step: which there are, which is taken, and the two that are faster on a CPU than the loops."""
