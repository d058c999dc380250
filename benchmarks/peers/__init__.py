"""Scripts that run inside the virtual environments of other projects. None of them imports dora_rl."""
