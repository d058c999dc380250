"""The built-in rollout engine: continuous batching over versioned weights, with a KV cache that moves."""
