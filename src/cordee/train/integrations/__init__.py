"""The SDK inside loops that are not the user's own: Hugging Face's Trainer and Lightning.

Each module imports its library and is imported by its name; this one imports nothing. They only know where each loop
keeps its state; how to save and how to stop is in the rooms around.
"""
