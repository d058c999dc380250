"""The trainer: finished groups in, gradients accumulated, versions out. It imports `core` and `models` only."""
