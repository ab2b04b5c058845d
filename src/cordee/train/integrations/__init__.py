"""The SDK inside loops that are not the user's own: Hugging Face's Trainer, Lightning, torchdata's loader.

Each module imports its library and is imported by its name; this one imports nothing. They are thin: what a checkpoint
is and how ranks stop is in the rooms around, here is only where each loop keeps what it needs to go on.
"""
