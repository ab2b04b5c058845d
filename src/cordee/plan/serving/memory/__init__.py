"""Memory of a replica: weights, KV cache, activations, and the allocators of the cache (pure)."""
