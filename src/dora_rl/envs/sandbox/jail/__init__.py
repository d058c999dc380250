"""Confines the process that runs the code, before the code runs; uses only the standard library.

The process gives up its rights in an order in which each step is still allowed, and none can be undone: capabilities,
limits, files (Landlock), system calls (seccomp). None of these needs root or namespaces, so the sandbox works for any
user and in a container.
"""

MAIN = "main.py"
"""The file name of the code in its folder."""
