"""A Flower app that uses everything in fedstrata.flower."""
