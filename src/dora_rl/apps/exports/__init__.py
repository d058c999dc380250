"""Runs in the formats of other tools: Perfetto traces, CSV tables, Prometheus metrics, OpenTelemetry spans."""
