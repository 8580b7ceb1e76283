"""Benchmarks: fedstrata against its peers on the same work. `make bench`, `make bench-quick`; docs/performance.md."""
