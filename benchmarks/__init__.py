"""Benchmarks; each writes results/NAME.json with its targets."""
