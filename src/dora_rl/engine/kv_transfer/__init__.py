"""Running requests as bytes: packing them with their KV, and the shared memory that carries them."""
