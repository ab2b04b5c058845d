"""Storage of checkpoints: a blob store, a commit log, content-addressed chunks and manifests; without torch."""
