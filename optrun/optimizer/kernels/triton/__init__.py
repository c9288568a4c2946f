"""A step on a CUDA or ROCm device in one launch, LAMB's in three; imported, and Triton with it, where it is used."""
