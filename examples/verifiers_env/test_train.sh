#!/usr/bin/env bash
# The shortest run: 20 samples, batches of 4, one epoch, on Tinker.
set -euo pipefail

exec "$(dirname "$0")/train_verifiers_tinker.sh" \
    +verifiers.max_samples=20 \
    data.train_batch_size=4 \
    trainer.total_epochs=1 \
    'trainer.logger=[console,wandb]' \
    "$@"
