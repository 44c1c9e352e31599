"""Benchmarks: `python -m bench.NAME [--json]`; each prints figures of one run on one machine."""
