"""Runs the production orchestrator against models of hardware and workload, on a virtual clock."""
