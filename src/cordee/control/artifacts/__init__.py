"""Artifacts: names, versions, tags, stages and lineage over the chunks of `storage/registry/`."""
