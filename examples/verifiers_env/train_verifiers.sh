#!/usr/bin/env bash
# Training on local GPUs with rLLM's verl backend. Further words override: train_verifiers.sh trainer.total_epochs=2
set -euo pipefail
cd "$(dirname "$0")/../.."

exec "${PYTHON:-python}" examples/verifiers_env/train.py \
    +backend=verl \
    +verifiers.env_id="${ENV_ID:-primeintellect/alphabet-sort}" \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    data.train_batch_size=64 \
    trainer.total_epochs=10 \
    'trainer.logger=[console]' \
    "$@"
