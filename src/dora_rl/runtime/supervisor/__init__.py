"""The supervisor process: it drives the orchestrator and talks to the workers."""
