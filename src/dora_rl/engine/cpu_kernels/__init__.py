"""Kernels in C++ for the CPU, compiled on first use."""
