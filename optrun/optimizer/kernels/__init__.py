"""Ways to compute one step.

Which there are, which is taken, and those that are faster than the loops.
"""
