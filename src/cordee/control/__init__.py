"""The control plane: ports, the tick, the store, executors and the HTTP API. `schedule` decides; this carries out."""
