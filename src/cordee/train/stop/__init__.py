"""How a gang leaves: who hears of it, the step that all agree on, what can still be made durable."""
