"""Artifacts: datasets, models, adapters and indexes as immutable manifests over chunks that versions share.

    cut.py       a file into chunks, at the borders of tensors          planes.py   a chunk to stored bytes and back
    manifest.py  what an artifact holds                                 store.py    push, pull and verify
    pickles.py   files that would run code when they are loaded         signature.py  who says so: Ed25519
    oci.py       to and from an OCI image layout                        compare.py  two artifacts beside each other

Names, versions, tags and lineage are events of the server's log: `control/artifacts/`.
"""
