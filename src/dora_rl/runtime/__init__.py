"""The local runtime: processes on one machine behind the orchestrator's commands."""
