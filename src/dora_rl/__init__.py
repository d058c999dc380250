"""dora-rl: reinforcement learning for language models with several policy versions live at once."""

__version__ = "0.1.0"
