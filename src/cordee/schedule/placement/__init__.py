"""Which GPUs a gang gets: shapes, free GPUs by domain, packing. Not whose turn it is, nor who must leave."""
