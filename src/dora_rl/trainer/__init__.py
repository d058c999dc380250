"""Accumulates the gradients of finished groups and publishes versions; imports `core` and `models` only."""
