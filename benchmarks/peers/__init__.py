"""What runs inside the virtual environments of others. Nothing here imports dora_rl."""
