"""The worker processes of a run: rollout, trainer ranks and reward."""
