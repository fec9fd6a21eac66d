"""What the cache saves, measured; `python -m benchmarks.cache`."""
