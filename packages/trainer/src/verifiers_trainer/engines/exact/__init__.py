"""Prompts that begin with the token ids that were sampled (``history = "exact"``)."""
