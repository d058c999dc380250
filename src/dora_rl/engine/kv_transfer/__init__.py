"""Requests that move between engines: their format as bytes, packing with their KV, and shared memory for them."""
