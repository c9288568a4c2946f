"""A tool, not a test: plants small bugs in the package and counts which of them the tests find."""
