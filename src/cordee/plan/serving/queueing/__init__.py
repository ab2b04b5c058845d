"""Requests that arrive: continuous batching, the prefix cache, pools of replicas (pure)."""
