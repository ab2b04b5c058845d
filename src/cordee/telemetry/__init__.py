"""Streams of events in files, notices, the cloud's metadata service and profiles.

Every rank imports this room, so it imports no torch.
"""
