"""How a run starts: in this process, or on ranks."""
