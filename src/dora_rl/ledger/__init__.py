"""The durable record of what became of every prompt."""
