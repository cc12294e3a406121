"""The OpenAI endpoint of the embedded engine: requests, replies, streams, tool calls."""
