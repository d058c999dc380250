"""The nouns of the system, the events and commands that cross its seams, and its errors. No torch, no I/O loops."""
