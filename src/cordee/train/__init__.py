"""The SDK inside the user's training process, and its uploader.

This module imports nothing: the uploader starts through it and has to be light.
"""
