"""Where worker processes come from: forked on this machine, or Ray actors on a cluster."""
