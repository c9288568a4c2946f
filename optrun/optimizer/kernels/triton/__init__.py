"""A step on a CUDA or ROCm device in one launch, LAMB's in three.

Imported, and Triton with it, where it is used.
"""
