"""Jobs that the benchmarks of whole runs train."""
