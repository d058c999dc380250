"""vLLM behind the engine port. Only `core`, `worker` and `connector` import vLLM, in the process that runs it."""
