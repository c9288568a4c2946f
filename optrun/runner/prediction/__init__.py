"""Rows of a file to predictions of a trained model.

One file a kind, and how they are kept and written.
"""
