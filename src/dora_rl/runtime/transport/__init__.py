"""What crosses process boundaries: messages, weights and KV."""
