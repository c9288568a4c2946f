"""One run, from the configuration to a finished run directory."""
