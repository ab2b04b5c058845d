"""How a gang leaves: notices, the step that all ranks agree on, and what can still be made durable."""
