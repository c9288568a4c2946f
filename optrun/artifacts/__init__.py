"""What a run leaves on disk: names, atomic writes, metrics, checkpoints."""
