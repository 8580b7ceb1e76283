"""Folders are those of the package, rules has its axes, and support is what several tests use."""
