"""Reads run directories and says what they show: curves, tables, statistics, warnings, pages.

Imports no training.
"""
