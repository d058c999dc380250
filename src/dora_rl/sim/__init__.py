"""Drives the orchestrator of production against models of hardware and workload, on a virtual clock."""
