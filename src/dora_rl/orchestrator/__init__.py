"""Every decision of the system: one pure state machine and its policies. No torch, no I/O, no clock, no randomness."""
