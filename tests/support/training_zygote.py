"""What the fork server of trainings imports before it forks; see `training_child.child_context`.

Nothing here may start a thread or compute with torch: neither survives a fork.
"""

import gc
import importlib.util

import transformers.models.qwen3.modeling_qwen3
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import verifiers_trainer.trainer
from support import ranks_work, split_runs, training, zero_runs

if importlib.util.find_spec("deepspeed"):  # accelerate imports it in every training, where it is installed
    import deepspeed

get_checkpoint_conversion_mapping("qwen3")  # compiles a thousand patterns, which the first saved model needs

# Every training ends with a full collection, which would walk through, and so copy, all of the above.
gc.disable()
gc.collect()
gc.freeze()
gc.enable()
