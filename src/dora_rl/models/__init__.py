"""The model definition that engine and trainer share: both run the same `transformers` module."""
