"""The NodeAgent: starts the ranks of one node, gives them notice, ends them and reports what happened.

One process a node, beside the server and outliving it. It decides nothing. No torch, no server library.
"""
