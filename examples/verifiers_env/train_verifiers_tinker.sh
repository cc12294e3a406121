#!/usr/bin/env bash
# Training with rLLM's Tinker backend; TINKER_API_KEY stands in examples/verifiers_env/.env or in the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec "${PYTHON:-python}" examples/verifiers_env/train.py \
    +backend=tinker \
    +verifiers.env_id="${ENV_ID:-primeintellect/alphabet-sort}" \
    tinker_base_url="${TINKER_BASE_URL:-null}" \
    model.name="${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
    model.lora_rank=32 \
    training.group_size=16 \
    sampling.temperature=1.0 \
    data.train_batch_size=64 \
    trainer.total_epochs=10 \
    'trainer.logger=[console]' \
    "$@"
