"""Examples and what they are made of: datasets, prompts, messages, text and tool schemas."""
