"""What a run writes for later: checkpoints, tuned folders, peft's files, and what they say of their base."""
