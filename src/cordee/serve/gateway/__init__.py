"""The gateway: the OpenAI API in front of the replicas of services; a stream survives its replica.

Decisions are made in `serve/policy`, engines' dialects are known in `serve/engines`; this room has the sockets, the
clock and the open requests.
"""
