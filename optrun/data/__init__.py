"""Where examples come from, and in which order they are served."""
