"""How a client's round is computed: one client at a time, by the same code on every engine."""
