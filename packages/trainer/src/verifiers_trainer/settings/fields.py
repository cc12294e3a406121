"""Settings of a training run, one line each: type, range, resume rule, other names, default,
meaning.

A line is ``name: Annotated[type, marks] = default``. Ranges are ``msgspec.Range``, choices
``Literal``. A setting must be the same when a training is resumed unless its line has ``Free``.
``Inherited`` has the lines of the fields of ``transformers.TrainingArguments``, so that a file can
be checked before transformers is imported, which takes seconds.

Rules over several settings are in ``cross_field_rules``, derived values in ``config``, names whose
value is converted in ``compat``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin

from verifiers.runtime.values import Also, MinusOne, Range, convert, parts
from verifiers.storage.identity import Free
from verifiers_trainer.algorithm.state import has_state

TRANSFORMERS = "5.23"
"""The version whose fields ``Inherited`` lists; those that a newer version adds take any value and
must match."""

SELF = "self"
"""The value of ``teacher`` that is the policy."""

# --- marks ----------------------------------------------------------------------------------------


class FreeKeys:
    """A resumed training may change these entries of the table."""

    def __init__(self, reason: str, keys: str):
        self.reason, self.keys = reason, frozenset(keys.split())


@dataclass(frozen=True, slots=True)
class OnceSet:
    """Must match from the time it has a value: a resumed training may set what was None."""


class Unsupported:
    """A field of transformers that this trainer does not implement: the alternative, and the values
    that disable it."""

    def __init__(self, instead: str, *off: object):
        self.instead, self.off = instead, off


RUN_LENGTH = Free("how long the run is")
LOGGING = Free("what is logged")
SAVING = Free("which checkpoints are written, and where copies go")
EVALUATION = Free("how the policy is evaluated, not how it is trained")
SPEED = Free("speed and memory; gradients and the sampled distribution are unchanged")
PLACEMENT = Free("devices, processes, servers and folders")
TIMEOUTS = Free("how long to wait")
ALARMS = Free("when to warn, refuse or stop")
RESUMING = Free("how a checkpoint is resumed")
LOADING = FreeKeys(
    "location of the model files, and how they are read",
    "attn_implementation cache_dir device_map force_download local_files_only low_cpu_mem_usage"
    # so a token is not saved in the checkpoint
    " max_memory offload_folder proxies token use_safetensors",
)
ADAPTER = FreeKeys(
    "location of the base model, and the version of peft",
    "base_model_name_or_path revision peft_version",
)
SAMPLES = "a sampling argument"
RESHAPES = (
    "a sampling argument that makes the sampled distribution differ from the trained one, on"
    " purpose"
)

Few = Annotated[int, Range(ge=1, le=10**6)]
Count = Annotated[int, Range(ge=1, le=10**9)]
Number = Annotated[int, Range(ge=0, le=10**9)]
Share = Annotated[float, Range(ge=0.0, le=1.0)]
Ratio = Annotated[float, Range(ge=0.0)]
Width = Annotated[float, Range(ge=1e-9, le=1e9)]
Seconds = Annotated[float, Range(ge=1e-3, le=1e9)]
Aggregation = Literal[
    "token_mean", "sequence_mean", "constant_length", "sequence_sum", "prompt_mean"
]

# --- settings -------------------------------------------------------------------------------------


class Inherited:
    """Fields of ``transformers.TrainingArguments`` with its defaults."""

    # --- optimizer and arithmetic
    per_device_train_batch_size: Annotated[int, SPEED]
    num_train_epochs: Annotated[float, RUN_LENGTH, Also("num_epochs", "epochs")]
    lr_scheduler_kwargs: dict[str, Any] | str | None
    warmup_steps: Annotated[float, Also("warmup_ratio")]  # below 1 it is a share of the steps
    optim: str
    optim_args: str | None
    weight_decay: float
    adam_beta1: Share
    adam_beta2: float
    adam_epsilon: float
    optim_target_modules: str | list[str] | None
    gradient_accumulation_steps: Annotated[
        int,
        Unsupported(
            "batch_size counts all rollouts of a step, micro_batch_size splits them; GRPOConfig "
            "multiplies them instead",
            1,
        ),
    ]
    average_tokens_across_devices: bool
    label_smoothing_factor: Annotated[float, Unsupported("there are no labels to smooth", 0.0)]
    fp16: Annotated[bool, PLACEMENT]
    tf32: Annotated[bool | None, PLACEMENT]
    activation_checkpointing: Annotated[bool | None, SPEED]
    activation_checkpointing_kwargs: Annotated[dict[str, Any] | str | None, SPEED]
    gradient_checkpointing: Annotated[bool | None, SPEED]
    gradient_checkpointing_kwargs: Annotated[dict[str, Any] | str | None, SPEED]
    torch_compile: Annotated[bool, SPEED]  # of the layers, see ``policy.compiled``
    torch_compile_backend: Annotated[str | None, SPEED]
    torch_compile_mode: Annotated[
        str | None,
        Unsupported(
            "its CUDA graphs are of fixed shapes, and one process captures one at a time",
            *(None, "default", "max-autotune-no-cudagraphs"),
        ),
        SPEED,
    ]
    use_liger_kernel: Annotated[bool, SPEED]
    liger_kernel_config: Annotated[dict[str, Any] | None, SPEED]
    use_cache: bool
    neftune_noise_alpha: Annotated[
        float | None, Unsupported("noise makes sampler and trainer disagree", None)
    ]
    torch_empty_cache_steps: Annotated[
        int | None, Unsupported("lower micro_batch_tokens instead", None)
    ]
    auto_find_batch_size: Annotated[bool, Unsupported("lower micro_batch_tokens instead", False)]
    full_determinism: bool
    seed: int
    data_seed: int | None
    dataloader_drop_last: bool
    dataloader_in_order: bool
    remove_unused_columns: bool
    label_names: list[str] | None
    train_sampling_strategy: Annotated[
        str, Unsupported("shuffle_dataset decides the order of the examples", "random")
    ]
    length_column_name: str
    # --- logging
    logging_strategy: Annotated[str, LOGGING]
    logging_first_step: Annotated[bool, LOGGING]
    log_on_each_node: Annotated[bool, LOGGING]
    logging_nan_inf_filter: Annotated[bool, LOGGING]
    include_num_input_tokens_seen: Annotated[
        str | bool, Unsupported("metrics.jsonl counts tokens", False, "no"), LOGGING
    ]
    log_level: Annotated[str, LOGGING]
    log_level_replica: Annotated[str, LOGGING]
    disable_tqdm: Annotated[bool | None, LOGGING]
    project: Annotated[str, LOGGING]
    trackio_space_id: Annotated[str | None, LOGGING]
    trackio_bucket_id: Annotated[str | None, LOGGING]
    trackio_static_space_id: Annotated[str | bool | None, LOGGING]
    debug: Annotated[str | list[str], LOGGING]
    skip_memory_metrics: Annotated[bool, LOGGING]
    # --- evaluation
    bf16_full_eval: Annotated[bool, EVALUATION]
    fp16_full_eval: Annotated[bool, EVALUATION]
    eval_delay: Annotated[float, EVALUATION]
    per_device_eval_batch_size: Annotated[int, EVALUATION]
    prediction_loss_only: Annotated[bool, EVALUATION]
    eval_on_start: Annotated[bool, EVALUATION]
    eval_do_concat_batches: Annotated[bool, EVALUATION]
    eval_use_gather_object: Annotated[bool, EVALUATION]
    eval_accumulation_steps: Annotated[int | None, EVALUATION]
    include_for_metrics: Annotated[list[str], EVALUATION]
    batch_eval_metrics: Annotated[bool, EVALUATION]
    load_best_model_at_end: Annotated[bool, EVALUATION]
    # the best value so far is one of this metric
    metric_for_best_model: Annotated[str | None, OnceSet()]
    greater_is_better: Annotated[bool | None, OnceSet()]
    do_eval: Annotated[bool, EVALUATION]
    do_predict: Annotated[bool, EVALUATION]
    # --- saving and resuming
    save_only_model: Annotated[bool, SAVING]
    save_on_each_node: Annotated[bool, SAVING]
    save_total_limit: Annotated[Count | None, SAVING]
    enable_jit_checkpoint: Annotated[bool, SAVING]
    push_to_hub: Annotated[bool, SAVING]
    hub_token: Annotated[str | None, SAVING]
    hub_private_repo: Annotated[bool | None, SAVING]
    hub_model_id: Annotated[str | None, SAVING]
    hub_strategy: Annotated[str, SAVING]
    hub_always_push: Annotated[bool, SAVING]
    hub_revision: Annotated[str | None, SAVING]
    ignore_data_skip: Annotated[bool, RESUMING]
    restore_callback_states_from_checkpoint: Annotated[bool, RESUMING]
    do_train: Annotated[bool, RESUMING]
    resume_from_checkpoint: Annotated[str | None, RESUMING]
    # --- devices and processes
    use_cpu: Annotated[bool, PLACEMENT]
    accelerator_config: Annotated[dict[str, Any] | str | None, PLACEMENT]
    parallelism_config: Annotated[None, PLACEMENT]  # in Python alone
    dataloader_num_workers: Annotated[int, SPEED]
    dataloader_pin_memory: Annotated[bool, SPEED]
    dataloader_persistent_workers: Annotated[bool, SPEED]
    dataloader_prefetch_factor: Annotated[int | None, SPEED]
    dataloader_multiprocessing_context: Annotated[str | None, SPEED]
    ddp_find_unused_parameters: Annotated[bool | None, PLACEMENT]
    ddp_bucket_cap_mb: Annotated[int | None, PLACEMENT]
    ddp_broadcast_buffers: Annotated[bool | None, PLACEMENT]
    ddp_static_graph: Annotated[bool | None, PLACEMENT]
    ddp_backend: Annotated[str | None, PLACEMENT]
    ddp_timeout: Annotated[int, TIMEOUTS]
    fsdp: Annotated[str | None, PLACEMENT]
    fsdp_config: Annotated[dict[str, Any] | str | None, PLACEMENT]
    deepspeed: Annotated[dict[str, Any] | str | None, PLACEMENT]
    local_rank: Annotated[int, PLACEMENT]


@dataclass
class Settings:
    """Settings of this package, and those of ``transformers`` with another default."""

    # --- run, optimizer and checkpoints (fields of transformers, other defaults) ------------------
    output_dir: Annotated[str | None, PLACEMENT] = None
    """Folder of the run; default ``outputs/<run_name or the time>``."""
    learning_rate: Annotated[Annotated[float, Range(ge=0.0, le=1e3)] | None, Also("lr")] = None
    """Default 1e-5 with LoRA, else 1e-6."""
    lr_scheduler_type: str = "constant"
    """Schedule of the learning rate, by a name of transformers: constant, linear, cosine,
    constant_with_warmup, …."""
    max_steps: Annotated[int, Range(ge=1, le=10**12), MinusOne("passes alone"), RUN_LENGTH] = 500
    """Optimizer steps; -1, or giving ``num_train_epochs`` alone, counts them from passes over the
    examples."""
    bf16: Annotated[bool | None, PLACEMENT] = None
    """Compute in bfloat16; None = where the accelerator supports it. Without an accelerator
    training computes in float32; True then keeps the frozen weights under a LoRA adapter in
    bfloat16, if the CPU has instructions for it."""
    max_grad_norm: Annotated[float, Range(ge=0.0, le=1e9)] = 1.0
    """Largest norm of the gradient; a longer gradient is scaled down to it. 0 = no limit."""
    logging_steps: Annotated[float, LOGGING] = 1
    """Optimizer steps from one log line to the next; below 1 a share of the run."""
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"], SAVING] = "steps"
    """When to write a checkpoint: every ``save_steps`` ("steps"), after each pass over the examples
    ("epoch"), when the evaluation is the best so far ("best"), or never ("no")."""
    save_steps: Annotated[float, SAVING] = 50
    """Optimizer steps from one checkpoint to the next; below 1 a share of the run."""
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], EVALUATION] = "no"
    """When to evaluate: every ``eval_steps`` ("steps"), after each pass over the examples
    ("epoch"), never ("no")."""
    eval_steps: Annotated[float | None, EVALUATION] = 50
    """Optimizer steps from one evaluation to the next; below 1 a share of the run."""
    report_to: Annotated[Any, LOGGING] = "none"
    """Trackers that log every step's metrics: wandb, trackio, tensorboard, a list of them, none, or
    auto (wandb where it is installed and configured)."""

    # --- model ------------------------------------------------------------------------------------
    model_init_kwargs: Annotated[dict[str, Any] | None, LOADING] = None
    """Keywords of ``from_pretrained`` when the model is given by name."""
    use_liger: Annotated[bool, SPEED] = True
    """Liger's layer kernels (norm, MLP, rotary) for a model given by name, on CUDA where they are
    installed."""
    master_weights: Literal["fp32", "model"] = "fp32"
    """Data type of the trained parameters: float32 ("fp32"), since bf16 loses small updates, or as
    loaded ("model")."""
    disable_dropout: bool = True
    """Set every dropout to 0: dropout makes the log-probabilities of sampler and trainer differ."""
    use_lora: bool = True
    """Train a LoRA adapter when the model has none and no ``peft_config`` is given."""
    lora_rank: Few = 8
    """Rank of the adapter's matrices: more is more parameters to train."""
    lora_alpha: Few = 32
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    lora_dropout: Annotated[float, Range(ge=0.0, le=0.999)] = 0.0
    """Dropout on the adapter's input; set to 0 by ``disable_dropout``."""
    lora_target_modules: list[str] | str | None = None
    """Names of the layers that get an adapter; None = every linear layer but the head."""
    lora_modules_to_save: list[str] | None = None
    """Modules that are fully trained, in addition to the adapter."""
    lora_use_rslora: bool = False
    """Scale the adapter by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)."""
    lora_per_role: bool = False
    """Of an environment of several roles: train an adapter for each trained role, over one frozen
    base. Off: one adapter is trained in all roles."""
    train_vision: bool = False
    """Of a model that takes images, train the parts that see as well (tower and projector), or
    adapt them. Off: they stay as loaded, and an adapter covers the part that computes text."""
    merge_adapter: bool = False
    """With a saved adapter as the model: merge it into its base, and train the result as any model.
    Off: that adapter is trained further."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen base under the adapter in four bits, about a third of its memory; needs
    bitsandbytes. None: as loaded, or as a saved adapter was trained."""
    lora_config: Annotated[Any, ADAPTER] = None
    """A ``peft.LoraConfig`` in place of all ``lora_*`` above."""

    # --- batch ------------------------------------------------------------------------------------
    rollouts_per_example: Annotated[Few, Also("num_generations", "group_size")] = 16
    """Size of a group: the rollouts of an example, whose mean reward is the baseline."""
    batch_size: Count = 512
    """Rollouts of a batch: of an optimizer step, or of ``updates_per_batch``. A multiple of
    ``rollouts_per_example`` and of ``micro_batch_size``."""
    micro_batch_size: Annotated[Count, SPEED] = 8
    """Rollouts of maximum length in one forward pass: with packing, the tokens of a packed row are
    bounded by ``micro_batch_size`` x ``max_seq_len`` (and by 1024, on a CPU 512, where attention
    has no kernel for them)."""
    micro_batch_tokens: Annotated[Annotated[int, Range(ge=2, le=10**9)] | None, SPEED] = None
    """Tokens of a packed row, in place of the bound by ``micro_batch_size``; a longer sample is a
    separate row."""
    packing: Annotated[bool, SPEED] = True
    """Pack samples end to end into rows; False puts each sample in a separate row."""
    share_prompts: Annotated[bool, SPEED] = True
    """Compute what samples begin with alike, such as the prompt of a group, once per packed row, as
    a tree of prefixes. The gradient is the same. Only with ``packing``, and with PyTorch attention
    over the whole context."""
    max_seq_len: Annotated[int, Range(ge=2, le=10**9)] = 2048
    """Tokens of a conversation; longer rollouts carry no loss and are never truncated."""
    max_prompt_len: Count | None = None
    """Tokens of an example's prompt; see ``prompt_overflow``."""
    prompt_overflow: Literal["skip", "truncate_left"] | None = None
    """Longer prompts: "skip" the example (the default) or "truncate_left" (keep the end of the
    prompt: of its tokens, and in environments of several turns of its text)."""
    max_completion_len: Annotated[Count | None, Also("max_completion_length")] = None
    """Tokens of everything after the first prompt. Bounds each turn, and longer rollouts carry no
    loss. Also the denominator of the aggregation "constant_length", which is otherwise
    ``max_seq_len``."""
    shuffle_dataset: bool = True
    """Draw the training examples in an order shuffled by ``seed``, a new order in each pass; False
    keeps the order of the rows."""
    updates_per_batch: Few = 1
    """Optimizer steps that the rollouts of a batch are divided among, whole groups together where
    there are enough."""
    num_iterations: Few = 1
    """Times that each batch is used: a batch is trained for ``updates_per_batch`` x
    ``num_iterations`` steps."""

    # --- finished rollouts ------------------------------------------------------------------------
    saved_runs: Annotated[list[str] | str | None, PLACEMENT] = None
    """Folders of saved runs to train on in place of sampling, as ``vf-eval`` writes them. Their
    rollouts must match when a training is resumed, and not the folders. The loss "sft" imitates
    them, any other weighs them by reward."""
    min_reward: Annotated[float, Range()] | None = None
    """With "sft": imitate rollouts of at least this reward; None = of any, unknown
    rewards included."""
    max_per_example: Count | None = None
    """With "sft": imitate at most as many rollouts of an example, those with the
    highest rewards."""
    drop_duplicates: bool = True
    """With "sft": imitate one of the rollouts of an example that have equal tokens."""

    # --- data schedule ----------------------------------------------------------------------------
    curriculum: Literal["uniform", "pool"] = "uniform"
    """Which examples are sampled: "uniform", each once in a pass, or "pool", first those whose last
    group had a mean reward between .2 and .8 of the range of the run's rewards, or that were never
    sampled. Another rests for one pass, for three after its second such group in a row, then for
    seven, and is measured again. Does not apply to batches that a subclass selects."""
    difficulty_schedule: list[Any] | None = None
    """Pairs (epoch, difficulty) in rising order of epochs: train on examples of this difficulty
    until that epoch, after the last epoch on those of the last difficulty. A difficulty is a value
    of ``difficulty_key``, a list of values, or a predicate over the example's row."""
    difficulty_key: Any = "difficulty"
    """Column with an example's difficulty ("easy" where it is missing), a function of the row, or
    its import path ``"package.module:function"``."""
    reward_weights_schedule: dict[Any, Any] | None = None
    """Weights of the reward functions (of a ``RubricGroup``: of its rubrics) by epoch: number ->
    weights in their order, or by name; "default" for all other epochs. Rollouts are not scored
    again."""
    env_weights: dict[str, float] | None = None
    """Share of the groups per environment of an ``EnvGroup``, by name; None: in proportion to the
    datasets."""

    # --- sampling ---------------------------------------------------------------------------------
    max_tokens: Annotated[Count | None, SAMPLES, Also("max_new_tokens")] = None
    """Tokens per turn; None = what is left of ``max_seq_len``."""
    temperature: Annotated[float, Range(ge=1e-6, le=2.0), SAMPLES] = 1.0
    """Sampling temperature; the trained distribution is that at this temperature."""
    top_p: Annotated[float, Range(ge=1e-9, le=1.0), RESHAPES] = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this; 1 = from all."""
    top_k: Annotated[Annotated[int, Range(ge=-1, le=10**9)] | None, RESHAPES] = None
    """Sample from this many of the likeliest tokens; None or -1 = from all."""
    min_p: Annotated[Share, RESHAPES] = 0.0
    """Sample from tokens at least this likely relative to the likeliest; 0 = from all."""
    repetition_penalty: Annotated[float, Range(ge=1e-6, le=1e6), RESHAPES] = 1.0
    """Divides the scores of tokens that occurred before; 1 = no penalty."""
    presence_penalty: Annotated[float, Range(ge=-2.0, le=2.0), RESHAPES] = 0.0
    """Subtracted from the score of each token that was sampled before; 0 = no penalty."""
    frequency_penalty: Annotated[float, Range(ge=-2.0, le=2.0), RESHAPES] = 0.0
    """Subtracted from the score of a token for each time that it was sampled before; 0 = no
    penalty."""
    stop: Annotated[list[str] | str | None, SAMPLES] = None
    """Texts that end a turn."""
    guided_regex: Annotated[str | None, Also("vllm_guided_decoding_regex")] = None
    """A regular expression that completions must match; needs an inference server with constrained
    decoding."""
    truncated_sampling: Annotated[Literal["warn", "refuse"], ALARMS] = "warn"
    """Whether to "warn" about or "refuse" top_p, top_k, min_p, penalties, guided_regex and, in
    sampling_args, logit_bias, min_tokens and the like, which make the sampled distribution another
    than the trained distribution."""
    sampling_args: dict[str, Any] = field(default_factory=dict)
    """Additional sampling arguments of every request."""

    # --- objective --------------------------------------------------------------------------------
    recipe: Literal["policy_gradient", "clipped_updates", "best_of_group", "trl"] | None = None
    """A row of ``recipes.RECIPES``: its values replace the defaults of settings; those that are
    given win."""
    loss: Annotated[Any, Also("loss_type")] = "cispo"
    """A name of ``losses.OBJECTIVES``, which has the loss, aggregation, advantage and bounds of its
    source; ``"package.module:function"``, or a function. Each of those settings may
    be set apart."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Parameters of the loss; they override the settings below."""
    ratio_cap: Ratio = 5.0
    """Upper bound of the ratio of probabilities that weighs a token, for "cispo" and the other
    losses that cap it."""
    ratio_floor: Ratio = 0.0
    """Lower bound of that ratio, for "cispo"."""
    mask_ratio_low: Ratio = 0.125
    """Tokens whose ratio of probabilities lies below this carry no loss."""
    mask_ratio_high: Ratio = 8.0
    """Tokens whose ratio of probabilities lies above this carry no loss."""
    epsilon: Width = 0.2
    """Width of the clip below 1; default 0.2, and 3e-4 for "gspo"."""
    epsilon_high: Width | None = None
    """Width of the clip above 1; None: as ``epsilon``. Default 0.28 for "dapo" and 4e-4 for "gspo",
    while ``epsilon`` is not set either. For "cispo" another name of ``ratio_cap``."""
    delta: Ratio | None = None
    """Two-sided clip of "ppo": an upper bound of the ratio, applied first (arXiv 2505.07291)."""
    dual_clip: Annotated[float, Range(ge=1.0 + 1e-9, le=1e9)] | None = None
    """Bound c > 1 on the loss of "ppo" where the advantage is negative: at most -c times the
    advantage (arXiv 1912.09729); None = no bound."""
    advantage: Any = "mean"
    """A name of ``advantages.ADVANTAGES``, ``"package.module:function"``, a function, or a class with
    a state (``algorithm.state``). Default:
    "environment" where the rubric has a ``@vf.advantage`` method, which computes it, else that of
    the loss."""
    negative_advantage_weight: Share = 1.0
    """Factor of negative advantages: 1 = as they are, 0 = learn from what was better than the
    baseline alone. Their tokens count in the denominators of the loss either way."""
    credit: Literal["rollout", "turn"] = "rollout"
    """Unit of credit: the whole "rollout", or each "turn", whose discounted return is compared with
    those of the same turn in the group, as ``advantage`` says."""
    gamma: Share = 1.0
    """Discount per turn, with ``credit="turn"``; 0 = what the turn itself earned."""
    aggregation: Aggregation = "token_mean"
    """Weight of a token; default: that of the loss."""
    anchor: Literal["sampler", "recomputed"] = "sampler"
    """Denominator of the ratio: the log-probabilities of the "sampler", or those of the policy when
    the batch was built ("recomputed"), which needs a correction such as ``tis_cap``, or several
    steps on a batch."""
    tis_cap: Annotated[float, Range(ge=1e-9)] | None = None
    """Truncated importance sampling: weight min(o/μ, tis_cap) per token, o the policy of the batch,
    μ the sampler."""
    sequence_mask_cap: Annotated[float, Range(ge=1.0)] | None = None
    """Samples whose product of o/μ is larger carry no loss."""
    geo_mask: Sequence[float] | None = None
    """Samples whose geometric mean of o/μ is outside (low, high) carry no loss."""
    opsm_delta: Ratio | None = None
    """Samples with a negative advantage whose mean of log μ - log π is larger carry no loss."""
    beta: Annotated[float, Range(ge=0.0, le=1e9), Also("kl_coef", "kl_loss_coef")] = 0.0
    """Weight of the KL penalty to the reference, which is the policy before training, or the
    ``teacher``."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator: k2 or k3; k1 is refused, since its gradient is zero in expectation."""
    entropy_coef: Annotated[float, Range(ge=0.0, le=1e9), Also("entropy_coeff")] = 0.0
    """Weight of a bonus for the entropy of the policy at each trained token, in nats, over the
    whole vocabulary (PPO, arXiv 1707.06347, equation 9)."""
    sync_ref_model: bool = False
    """Update the reference: every ``ref_model_sync_steps`` steps it becomes
    alpha · policy + (1 - alpha) · reference, with alpha = ``ref_model_mixup_alpha``."""
    ref_model_sync_steps: Count = 100
    """Optimizer steps from one update of the reference to the next, with ``sync_ref_model``."""
    ref_model_mixup_alpha: Share = 0.5
    """Share of the policy in an updated reference, with ``sync_ref_model``."""
    teacher: Annotated[str | dict[str, str] | None, PLACEMENT] = None
    """The model that the loss "gkd" or "distill", or the penalty ``beta``, holds the policy near: a
    folder (of a model, an adapter or a run), a name such as "builtin:smollm2-135m", the URL of a
    server with prompt log-probabilities, or "self", the policy with its present weights, which
    knows more by ``teacher_context`` (with ``sync_ref_model`` a copy that follows it). A table has
    a teacher for each ``task`` of the rows. The files of a folder must match when a training is
    resumed, and not its place."""
    teacher_context: Any = None
    """What the teacher reads and the policy does not: "answer", "sibling" (a sibling's success),
    ``"package.module:function"``, or a function of ``row``, ``group`` and ``rollout`` (those that
    its parameters name), which returns messages that stand before the prompt, a text that ends it,
    or nothing."""
    teacher_top_k: Few | None = None
    """With "gkd": compare the probabilities of so many of the teacher's likeliest tokens one by
    one, and of all others together; None = of every token."""

    # --- pipeline ---------------------------------------------------------------------------------
    max_off_policy_steps: Annotated[int, Range(ge=0, le=16), Also("num_batches_ahead")] = 1
    """Largest age of a token's policy in batches, which are optimizer steps if a batch is one step;
    0 = synchronous."""
    max_concurrent: Annotated[Count, SPEED] = 1024
    """Rollouts in flight."""
    max_concurrent_scoring: Annotated[Count | None, SPEED] = None
    """Rollouts being scored at a time."""
    max_concurrent_tools: Annotated[Count | None, SPEED] = None
    """Tool calls at a time."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """Rollouts that reach ``max_off_policy_steps``: "wait" for them, or train on finished rollouts
    first and "drop" those that become too old, which favours short rollouts."""
    generation_timeout: Annotated[Seconds, TIMEOUTS, Also("async_generation_timeout")] = 600.0
    """Seconds without a finished rollout after which training stops."""
    rollout_timeout: Annotated[Seconds | None, TIMEOUTS] = None
    """Seconds for a rollout; None = ``generation_timeout``."""
    rank_timeout: Annotated[float, Range(ge=0.0, le=1e9), TIMEOUTS] = 60.0
    """Seconds without a sign of life of a process of several after which the others end, also
    inside a collective; 0 = only ``ddp_timeout`` bounds the wait."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups of equal rewards: "drop" and sample others, or "keep" with advantages of 0: their
    tokens count in the denominators of the loss and in statistics of the batch, and the KL penalty
    acts on them, as in GRPO. With advantage="best" a kept group has no best: it fills its place in
    the batch, and nothing of it is trained."""
    oversample: Annotated[float, Range(ge=1.0, le=1000.0)] = 2.0
    """At most this many times ``batch_size`` rollouts are generated for a step."""
    min_group_fraction: Annotated[float, Range(ge=1e-9, le=1.0)] = 0.75
    """Smallest share of a group's rollouts that must have a reward."""
    max_error_fraction: Annotated[Share, ALARMS] = 0.5
    """Share of failed rollouts, over the last four batches, above which training stops."""
    collapse: Annotated[Literal["stop", "warn"], ALARMS] = "stop"
    """With a ``teacher``: what to do when the reward has fallen from its best while the entropy or
    the length of completions halved or doubled, "stop" training or "warn"."""
    no_signal_steps: Annotated[Number | None, ALARMS] = None
    """Consecutive batches without any group of differing rewards before training stops; 0 = only
    warn. None: a run without any such group since its start stops after 4,096 rollouts and a pass
    over a small set, a solved set when 512 rollouts and such a pass all had the best reward, and
    any other continues, with warnings."""
    on_reward_hacking: Annotated[Literal["warn", "stop", "ignore"], ALARMS] = "warn"
    """When sampled rollouts are paid without solving their task (``hacking/*``): "warn", "stop" at
    the end of the batch with a checkpoint, or "ignore" and measure nothing."""
    skip_solved: bool = False
    """Stop sampling an example once two groups in a row solved it: a mean reward of at least 0.9 of
    the best reward seen in the run. When all examples are solved, all are sampled again. Does not
    apply to batches that a subclass selects."""
    keep_rows: str | None = None
    """A file of ``vf-audit ENV -m MODEL --keep FILE``: train only on the rows that it lists, which
    the model solves sometimes."""
    num_env_workers: Annotated[int, Range(ge=0, le=4096), SPEED] = 0
    """Processes that run and score the training rollouts, so that the code of the environment
    (loaded by id) uses more than one core; 0 = this process."""
    env_worker_backend: Annotated[Literal["process", "ray"], PLACEMENT] = "process"
    """Where the workers run: a "process" of this machine, or an actor of a "ray" cluster."""
    deterministic: bool = False
    """Make two runs with one seed identical bit for bit on the same machine;
    generation is slower."""

    # --- loss mask --------------------------------------------------------------------------------
    mask_env_responses: bool = True
    """Tokens that the policy did not sample carry no loss."""
    mask_truncated_completions: bool = False
    """Rollouts cut by a limit of tokens or time carry no loss."""
    zero_truncated_completions: bool = False
    """Rollouts cut by a limit of tokens or time get the reward 0 in place of the rubric's; with
    credit="turn" each of their turns does."""
    overlong: Literal["mask", "drop"] = "mask"
    """Rollouts longer than ``max_seq_len`` or ``max_completion_len``, which carry no loss: "mask"
    lets their rewards count in the baseline of their group, "drop" makes them unknown."""
    history: Literal["template", "exact"] = "template"
    """Prompt of a later turn: the whole conversation rendered anew by the chat "template", or the
    "exact" tokens of the turns so far plus the new messages. With "exact" a conversation is one
    sample even where the template drops earlier reasoning, and the model sees that reasoning again.
    If it is not set, an ``AgentEnv`` chooses "exact"."""
    require_increasing_context: Annotated[bool, ALARMS] = False
    """Refuse, in place of warning about, a chat template that rewrites earlier turns: every turn of
    a multi-turn rollout is then a separate sample, unless ``history`` is "exact"."""

    # --- inference --------------------------------------------------------------------------------
    inference: Annotated[str, PLACEMENT] = "auto"
    """Where rollouts are sampled: "embedded" (in this process, on the trained parameters
    themselves), "vllm" (the server at ``vllm_server_host`` and ``_port``), the URL of a vLLM
    server, several with commas between them, or "auto": the server when a URL is given or the
    default server serves this model, else embedded."""
    inference_base_url: Annotated[str | None, PLACEMENT] = None
    """URL of the server, or of several, when ``inference`` is not a URL."""
    vllm_server_host: Annotated[str, PLACEMENT] = "0.0.0.0"
    """Address of the vLLM server, when ``inference`` is "vllm"; the client takes 0.0.0.0 for
    127.0.0.1."""
    vllm_server_port: Annotated[int, Range(ge=1, le=65535), PLACEMENT] = 8000
    """Port of the vLLM server, when ``inference`` is "vllm"."""
    vllm_server_timeout: Annotated[Seconds, TIMEOUTS] = 300.0
    """Seconds to wait for the server to be up."""
    weight_sync: Annotated[Literal["auto", "lora_dir", "reload", "nccl", "ipc"], PLACEMENT] = "auto"
    """How weights are sent to a server: lora_dir (adapter files under new names), reload (the
    server reloads the model files), nccl (broadcast to its GPUs), ipc (memory of one GPU), or auto
    (the fastest that works)."""
    sync_dir: Annotated[str | None, PLACEMENT] = None
    """Folder for the files of lora_dir and reload, on a disk that the server sees; default
    ``<output_dir>/sync``."""
    sync_timeout: Annotated[Seconds, TIMEOUTS] = 300.0
    """Seconds for a push of weights, its retry included; also how long a server may be
    unreachable."""
    sync_every: Few = 1
    """Optimizer steps per push; at most ``max_off_policy_steps`` + 1."""
    embedded_mode: Annotated[
        Literal["auto", "padded", "static", "continuous", "deterministic"], SPEED
    ] = "auto"
    """How the embedded engine decodes: padded (one batch that rows join and leave), static (slots
    of fixed addresses, a CUDA graph for each step) or deterministic (one request at a time); auto
    is static on a CUDA device, for models with full attention, and padded elsewhere; continuous, of
    older versions, is padded."""
    embedded_concurrency: Annotated[Few | None, SPEED] = None
    """Requests that decode together; None = the rollouts in flight, at most four batches."""
    embedded_max_batch_tokens: Annotated[Count | None, SPEED] = None
    """Most prompt tokens of a forward pass of the embedded engine; None = 1,024 on a CPU, 8,192
    on a GPU."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "none"] = "auto"
    """Format of tool calls in completions: auto (read from the chat template), hermes, llama3_json,
    qwen3_coder, or none."""
    embedded_threads: Annotated[Annotated[int, Range(ge=1, le=10**4)] | None, SPEED] = None
    """Threads of torch's CPU kernels, for the whole process while the engine runs; None = one for a
    model of at most 2 million parameters, unless OMP_NUM_THREADS is set, and torch's own number for
    a larger model."""

    # --- evaluation -------------------------------------------------------------------------------
    eval_num_examples: Annotated[Count, MinusOne("all"), EVALUATION] = 64
    """Examples of an evaluation, the first of the set; -1 = all."""
    eval_rollouts_per_example: Annotated[Few, EVALUATION] = 1
    """Rollouts of each example of an evaluation."""
    eval_sampling_args: Annotated[dict[str, Any], EVALUATION] = field(default_factory=dict)
    """Sampling arguments of evaluations; they override those of training."""
    eval_required: Annotated[bool, EVALUATION] = False
    """Stop training when an evaluation fails; otherwise log the failure and continue."""

    # --- logging ----------------------------------------------------------------------------------
    run_name: Annotated[str | None, LOGGING] = None
    """Name of the run: of its folder under ``outputs``, and in trackers."""
    log_completions: Annotated[bool, LOGGING] = True
    """Write every step's rollouts to ``completions/step-<n>.jsonl``."""
    num_completions_to_print: Annotated[int, Range(ge=0, le=10**6), LOGGING] = 0
    """Rollouts to print every ``logging_steps``, with ``log_completions``."""
    log_tokens: Annotated[Number, LOGGING] = 4096
    """Sampled tokens of a step whose numbers are in its rollouts' file: log-probabilities,
    advantage, weight, mask."""
    log_unique_prompts: Annotated[bool, LOGGING, Also("wandb_log_unique_prompts")] = False
    """Log only the first rollout of each group."""
    keep_every: Annotated[Count | None, SAVING] = None
    """Keep the checkpoint of every n-th step in addition to ``save_total_limit``."""
    accept_changed_code: Annotated[bool, RESUMING] = False
    """Resume a run whose code has changed since: source files of the environment, loss, advantage,
    reward functions, hooks; its later checkpoints list what changed."""


class Configuration(Settings):
    """The settings as the rules over several of them read them: with what the caller gave, and what
    follows. ``RLConfig`` is the one there is."""

    if TYPE_CHECKING:
        component: str
        torch_compile: bool  # of transformers

        @property
        def server_url(self) -> str | None: ...

        @property
        def teachers(self) -> dict[str, str]: ...

        @property
        def reshaping(self) -> list[str]: ...

        @classmethod
        def default_of(cls, name: str) -> Any: ...

        def is_given(self, name: str) -> bool: ...

        def other_spelling(self, name: str) -> Any: ...

        def bounds(self) -> dict[str, Any]: ...


# --- reading the lines ----------------------------------------------------------------------------

Mark = TypeVar("Mark")


DECLARED = typing.get_type_hints(Inherited, include_extras=True) | typing.get_type_hints(
    Settings, include_extras=True
)
"""Setting -> its annotation, those of transformers included."""
PARTS = {name: list(parts(hint)) for name, hint in DECLARED.items()}
"""Setting -> the types and the marks on its line."""


@functools.cache
def field_names() -> frozenset[str]:
    """Every setting; a newer transformers is imported for the names that it adds."""
    if metadata.version("transformers").startswith(f"{TRANSFORMERS}."):
        return frozenset(DECLARED)
    from transformers.training_args import TrainingArguments

    return frozenset({*DECLARED, *(line.name for line in dataclasses.fields(TrainingArguments))})


def mark(name: str, kind: type[Mark]) -> Mark | None:
    """Return the mark of that kind on the line of a setting, or None.

    >>> mark("seed", Free), mark("logging_steps", Free)
    (None, Free(reason='what is logged'))
    """
    return next((part for part in PARTS.get(name, ()) if isinstance(part, kind)), None)


def problem_of(name: str, value: object, hint: object = None) -> str | None:
    """Return why ``value`` is not allowed for the setting ``name``, by its line, or by the
    annotation ``hint``; None when it is. Of a line without a range or choices every value is:
    transformers changes some of them.

    >>> problem_of("temperature", 0.7), problem_of("top_k", None)
    (None, None)
    >>> problem_of("temperature", 0.0)
    'temperature must be a number from 1e-06 to 2, not 0.0'
    """
    hint = DECLARED.get(name) if hint is None else hint
    kinds = list(parts(hint))
    unsupported = next((kind for kind in kinds if isinstance(kind, Unsupported)), None)
    if unsupported is not None and value not in unsupported.off:
        return f"{name} is {value!r}, which this trainer does not support: {unsupported.instead}"
    value = value.value if isinstance(value, enum.Enum) else value
    if any(isinstance(kind, Range) or get_origin(kind) is Literal for kind in kinds):
        try:
            convert(value, hint, in_python=True)
        except ValueError as error:
            return f"{name} {error}"
    return None


RESHAPING = frozenset(name for name in DECLARED if mark(name, str) == RESHAPES)
"""Sampling arguments that make the sampled distribution differ from the trained distribution, on
purpose."""
SAMPLING_FIELDS = frozenset(name for name in DECLARED if mark(name, str))
"""Sampling arguments that are settings, and therefore not allowed in ``sampling_args``."""


def resume_values(config: Settings) -> dict[str, object]:
    """Return the settings that must match when the training is resumed, as JSON values."""
    values = {}
    for name in [line.name for line in dataclasses.fields(config) if not mark(line.name, Free)]:
        value = plain(getattr(config, name))
        if (free := mark(name, FreeKeys)) and isinstance(value, dict):
            value = {key: member for key, member in value.items() if key not in free.keys}
        if value is not None or mark(name, OnceSet) is None:
            values[name] = value
    return values


def plain(value: object) -> Any:
    """Convert a value to JSON types, the same in every process.

    Of a dataclass, such as peft's ``LoraConfig``, only the fields that differ from their defaults
    are kept: a newer version of the library has more fields. A function becomes its name.

    >>> plain({"r": (1, 2.5), "cap": float("inf"), "modules": {"v", "q"}, "loss": len})
    {'r': [1, 2.5], 'cap': 'inf', 'modules': ['q', 'v'], 'loss': 'len'}
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    if isinstance(value, int | float | str | None):
        return value
    if has_state(value):  # its class alone: the state changes
        return type(value).__qualname__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [line.name for line in dataclasses.fields(value) if _is_changed(value, line)]
        return {name: plain(getattr(value, name)) for name in changed}
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(member) for member in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    text = getattr(value, "__name__", str(value))
    # an address differs between processes
    return type(value).__qualname__ if " at 0x" in text else text


def _is_changed(value: object, line: dataclasses.Field[object]) -> bool:
    default = (
        line.default if line.default_factory is dataclasses.MISSING else line.default_factory()
    )
    return bool(getattr(value, line.name) != default)
