"""The Ray runtime: the same supervisor and processes, each in a Ray actor of its own; needs the extra `ray`."""
