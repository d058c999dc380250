"""Tasks: problems, reward functions, environments, and the sandbox for model-written code."""
