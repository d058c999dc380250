"""Configs, data and rewards of the benchmarks' training runs."""
