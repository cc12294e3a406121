"""prime-rl: its run files read and written, of both ages; its calls on environments are core's own methods.

    run = read("configs/my_exp/orch.toml", "configs/my_exp/train.toml")     # -> our run, a document as vf-train's
    emit(run, era="v0.4", out_dir="configs/my_exp")                         # -> rl.toml, and the command that starts it

    python -m verifiers_trainer.integrations.prime_rl rl.toml --era 2025 --out configs/my_exp

Promise: what a file says and what we write say the same, key by key; a table or key that has no counterpart is named,
never skipped. Written after prime-rl's files of 2025 and of v0.3 and v0.4; prime-rl needs CUDA and was not run.
"""

from __future__ import annotations

from verifiers_trainer.cli.prime_rl_files import is_prime_rl, read
from verifiers_trainer.integrations.prime_rl.writing import ERAS, Emitted, emit

__all__ = ["ERAS", "Emitted", "emit", "is_prime_rl", "read"]
