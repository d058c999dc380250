"""The durable record of a run: its event log, its tokens and where they come from."""
