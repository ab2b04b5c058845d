"""The control plane: ports, tick, store, agents, engines and HTTP API. `schedule` decides; this carries out."""
