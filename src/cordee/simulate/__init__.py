"""A cluster in virtual time behind the control plane's three ports.

Everything here is a pure function of its inputs. It drives the same `Control.tick()` as the service.
"""
