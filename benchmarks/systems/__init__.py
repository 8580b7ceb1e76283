"""One script per system; each runs a workload's rounds in its own process and prints a JSON line per round."""
