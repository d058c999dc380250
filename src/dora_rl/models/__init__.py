"""One model definition for both sides: the rollout engine and the trainer run the same `transformers` module."""
