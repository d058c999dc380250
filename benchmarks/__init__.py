"""Benchmarks: each prints a table of its targets and writes the figures behind them to `results/`."""
