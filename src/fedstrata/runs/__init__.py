"""Runs and comparisons in directories: written while they go, resumed, and read."""
