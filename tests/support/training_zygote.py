"""What the fork server of trainings imports before it forks; see `training_child.child_context`.

Nothing here may start a thread or compute with torch: neither survives a fork.
"""

import gc
from importlib import import_module
from importlib.util import find_spec

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for module in ("verifiers_trainer.trainer", "transformers.models.qwen3.modeling_qwen3"):
    import_module(module)
for module in ("ranks_work", "split_runs", "training", "zero_runs"):  # what children call
    import_module(f"support.{module}")
if find_spec("deepspeed"):  # accelerate imports it in every training, where it is installed
    import_module("deepspeed")

# what every run records: the versions of packages, and the commit that git says
provenance = import_module("verifiers.storage.provenance")
provenance.versions()
provenance.own_commit()

# compiles a thousand patterns, which the first saved model needs
get_checkpoint_conversion_mapping("qwen3")

# Every training ends with a full collection, which would walk through, and so copy, all of the
# above.
gc.disable()
gc.collect()
gc.freeze()
gc.enable()
