"""Benchmarks: `python -m benchmarks.run --help`, and benchmarks/README.md."""
