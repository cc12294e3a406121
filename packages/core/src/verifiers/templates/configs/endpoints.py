"""Aliases of models and their endpoints, as Python; `endpoints.toml` in this folder has precedence.

The file is parsed, not executed. "key" is the NAME of an environment variable, never a key.
"""

ENDPOINTS = {
    "gpt-4.1-mini": {
        "model": "gpt-4.1-mini",
        "url": "https://api.openai.com/v1",
        "key": "OPENAI_API_KEY",
    },
    "gpt-4.1": {
        "model": "gpt-4.1",
        "url": "https://api.openai.com/v1",
        "key": "OPENAI_API_KEY",
    },
    "qwen3-4b": {
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "url": "http://127.0.0.1:8000/v1",
        "key": "OPENAI_API_KEY",
    },
    "qwen3-30b": {
        "model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "url": "http://127.0.0.1:8000/v1",
        "key": "OPENAI_API_KEY",
    },
}
