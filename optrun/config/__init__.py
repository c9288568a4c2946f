"""Types and meaning of every configuration value; no torch here."""
