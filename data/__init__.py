"""`tiny`, the embedded model: its corpus generator, training script, evaluation and shipped weights."""
