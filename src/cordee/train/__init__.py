"""The SDK inside the user's training process, and its drain.

This module imports nothing: the drain starts through it and has to be light.
"""
