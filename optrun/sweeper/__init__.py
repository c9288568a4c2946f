"""Many jobs as one set: found by what they are, done once, whatever ends."""
