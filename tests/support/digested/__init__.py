"""What `digests.py` runs, and what it takes of it."""
