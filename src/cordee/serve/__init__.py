"""Services at run time: replicas with their engines, the gateway before them, and the decisions of both."""
