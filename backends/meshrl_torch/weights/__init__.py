"""A policy's weights: whole (`transfer`), or broadcast from its shards (`sender`, `live_weights`)."""
