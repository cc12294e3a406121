"""prime-rl: read and write its run files of 2025 and of v0.3 and v0.4.

    run = read("configs/my_exp/orch.toml", "configs/my_exp/train.toml")     # -> a document in the format of vf-train
    emit(run, era="v0.4", out_dir="configs/my_exp")                         # -> rl.toml; prints the command

    python -m verifiers_integrations.prime_rl rl.toml --era 2025 --out configs/my_exp

Every key is converted to its counterpart; a table or key without a counterpart raises an error that
names it. Written against the files of prime-rl; prime-rl itself needs CUDA and was not run. Its
calls on environments are methods of core.
"""

from __future__ import annotations

from verifiers_integrations.prime_rl.writing import ERAS, Emitted, emit
from verifiers_trainer.cli.prime_rl_files import is_prime_rl, read

__all__ = ["ERAS", "Emitted", "emit", "is_prime_rl", "read"]
