"""Examples and their parts: datasets, prompts, messages, text and tool schemas."""
