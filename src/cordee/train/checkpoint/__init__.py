"""What a checkpoint is made of inside a rank: capture, drain, resume; and when one is due."""
