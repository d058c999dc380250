"""What runs inside the sandbox's process before the code does, with nothing but the standard library.

It gives up what the code must not have, in an order in which each step is still allowed, and can't be undone:
limits, capabilities, files (Landlock), system calls (seccomp). Neither needs root nor namespaces, so all of it works
for any user and in a container.
"""

MAIN = "main.py"
"""The code's name in its folder."""
