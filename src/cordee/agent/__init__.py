"""The NodeAgent: starts the ranks of one node, gives them notice, ends them and reports what happened.

One process per node; it outlives the server and makes no decisions. Imports neither torch nor server libraries.
"""
