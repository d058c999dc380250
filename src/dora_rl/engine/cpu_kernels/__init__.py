"""Kernels in C++ for the CPU, compiled on first use. See README.md. The package imports nothing of the engine."""
