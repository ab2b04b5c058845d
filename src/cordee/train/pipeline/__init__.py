"""The runtime of pipeline tables on real ranks, and rehearsals of them."""
