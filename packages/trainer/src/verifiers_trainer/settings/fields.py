"""Every setting of a training run as a field: its type, its default, and what it does, said once.

Of transformers' own fields those with other defaults are here. What follows from a setting is ``config``'s, what it may
be is ``rules``', and by which other names it is known ``compat``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


@dataclass
class RLFields(TrainingArguments):
    """The fields of ``RLConfig``."""

    # --- what transformers already has, with other defaults -----------------------------------------------------
    output_dir: str | None = None
    """Folder of the run; default ``outputs/<run_name or the time>``."""
    learning_rate: float | None = None  # type: ignore[assignment]
    """Default 1e-5 with LoRA, else 1e-6."""
    lr_scheduler_type: str = "constant"
    max_steps: int = 500
    """Optimizer steps; -1, or giving ``num_train_epochs`` alone, counts them from passes over the examples."""
    bf16: bool | None = None  # type: ignore[assignment]
    """Compute in bfloat16; None = where an accelerator can. Without one training is in float32; True then keeps the
    frozen weights under a LoRA adapter in bfloat16, if the CPU has instructions for it."""
    max_grad_norm: float = 1.0
    logging_steps: float = 1
    save_strategy: str = "steps"
    save_steps: float = 50
    eval_strategy: str = "no"
    eval_steps: float | None = 50
    report_to: Any = "none"
    """Trackers that get every step's numbers: wandb, trackio, tensorboard, a list of them, none, or auto:
    wandb where it is installed and configured."""

    # --- model --------------------------------------------------------------------------------------------------
    model_init_kwargs: dict[str, Any] | None = None
    """For ``from_pretrained`` when the model is given as a name."""
    use_liger: bool = True
    """Liger's layer kernels (norm, MLP, rotary) for a model given by name, on CUDA where they are installed."""
    master_weights: str = "fp32"
    """Trained parameters in float32 ("fp32"), since bf16 loses small updates, or as they were loaded ("model")."""
    disable_dropout: bool = True
    """Dropout makes sampler and trainer disagree for no reason; with True every dropout is 0."""
    use_lora: bool = True
    """Train a LoRA adapter when the model has none and no ``peft_config`` is given."""
    lora_rank: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | str | None = None
    """None: every linear layer but the head."""
    lora_modules_to_save: list[str] | None = None
    """Modules trained whole, beside the adapter."""
    lora_use_rslora: bool = False
    """Scale the adapter by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)."""
    lora_config: Any = None
    """A ``peft.LoraConfig`` in place of all ``lora_*`` above."""

    # --- batch --------------------------------------------------------------------------------------------------
    rollouts_per_example: int = 16
    """Siblings of one example, the group whose mean reward is the baseline."""
    batch_size: int = 512
    """Rollouts per optimizer step; a multiple of ``rollouts_per_example`` and of ``micro_batch_size``."""
    micro_batch_size: int = 8
    """Rollouts of the longest length that one forward pass holds: with packing, the tokens of a row are bounded by
    ``micro_batch_size`` x ``max_seq_len`` (and by 1024, on a CPU 512, where attention has no kernel for them)."""
    micro_batch_tokens: int | None = None
    """Tokens of one packed row, instead of what follows from ``micro_batch_size``; a longer sample stands alone."""
    packing: bool = True
    """Pack samples end to end into rows; False gives each sample a row of its own."""
    share_prompts: bool = True
    """Compute the prompt that the rollouts of a group share once for all of them that stand in a row. The gradient is
    the same. Only with ``packing``, and where the model's attention is PyTorch's own over the whole context."""
    max_seq_len: int = 2048
    """Tokens of one conversation; longer rollouts carry no loss and are never cut."""
    max_prompt_len: int | None = None
    """Tokens of an example's prompt; see ``prompt_overflow``."""
    prompt_overflow: str | None = None
    """What happens to longer prompts: "skip" (the default: such examples are not used) or "truncate_left" (the prompt
    keeps its end; environments of one turn alone)."""
    max_completion_len: int | None = None
    """Tokens of everything after the first prompt: bounds each turn, and longer rollouts carry no loss. Also the
    denominator of the aggregation "constant_length", which is otherwise ``max_seq_len``."""
    shuffle_dataset: bool = True
    num_iterations: int = 1
    """Optimizer steps on each batch. The lag of ``max_off_policy_steps`` is counted in batches."""

    # --- data schedule ------------------------------------------------------------------------------------------
    difficulty_schedule: list[Any] | None = None
    """Pairs (epoch, difficulty), epochs rising: until that epoch rows of this difficulty are trained on, after the last
    epoch those of the last difficulty. A difficulty is a value of ``difficulty_key``, a list of them, or a function of
    the row that says whether it belongs."""
    difficulty_key: Any = "difficulty"
    """Column that holds a row's difficulty ("easy" where it is missing), a function of the row, or its import path
    ``"package.module:function"``."""
    reward_weights_schedule: dict[Any, Any] | None = None
    """Weights of the reward functions (of a ``RubricGroup``: of its rubrics) by epoch: number -> weights in their
    order, or by name; "default" for the epochs that are not named. Rollouts are not scored again."""
    env_weights: dict[str, float] | None = None
    """Share of the groups that each environment of an ``EnvGroup`` gets, by its name; None: as large as its dataset."""

    # --- sampling -----------------------------------------------------------------------------------------------
    max_tokens: int | None = None
    """Tokens per turn; None = what is left of ``max_seq_len``."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] | str | None = None
    """Texts that end a turn."""
    guided_regex: str | None = None
    """A regular expression that completions must match; needs a server that can constrain its sampling."""
    truncated_sampling: str = "warn"
    """When top_p, top_k, min_p or a penalty makes the sampled distribution another than the trained one: "warn" or
    "refuse"."""
    sampling_args: dict[str, Any] = field(default_factory=dict)
    """Further sampling arguments of every request."""

    # --- objective ----------------------------------------------------------------------------------------------
    loss: Any = "cispo"
    """A name of ``losses.LOSSES`` or ``OBJECTIVES``, ``"package.module:function"``, or a function."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Parameters of the loss, over the ones below."""
    ratio_cap: float = 5.0
    ratio_floor: float = 0.0
    mask_ratio_low: float = 0.125
    mask_ratio_high: float = 8.0
    """Tokens whose ratio of probabilities lies outside [mask_ratio_low, mask_ratio_high] carry no loss."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: as ``epsilon``."""
    delta: float | None = None
    """Two-sided clip of "ppo": the ratio is bounded from above before anything else (arXiv 2505.07291)."""
    dual_clip: float | None = None
    advantage: Any = "mean"
    """A name of ``advantages.ADVANTAGES``, ``"package.module:function"``, or a function."""
    credit: str = "rollout"
    """What an advantage belongs to: the whole "rollout", or each "turn", which gets the discounted rewards from there
    on minus the mean of the siblings' same turn."""
    gamma: float = 1.0
    """Discount from turn to turn, with ``credit="turn"``."""
    aggregation: str = "token_mean"
    anchor: str = "sampler"
    """What ratios are relative to: the policy that sampled, or the policy when the batch was built ("recomputed")."""
    tis_cap: float | None = None
    """Weight of a token: min(o/μ, tis_cap), o the policy of the batch, μ the sampler."""
    sequence_mask_cap: float | None = None
    """Samples whose product of o/μ is larger carry no loss."""
    geo_mask: list[float] | tuple[float, float] | None = None
    """Samples whose geometric mean of o/μ is outside (low, high) carry no loss."""
    opsm_delta: float | None = None
    """Samples with a negative advantage whose mean of log μ - log π is larger carry no loss."""
    beta: float = 0.0
    """Weight of the penalty that keeps the policy near the reference, which is the policy before training."""
    kl_type: str = "k3"
    """Estimate of the penalty: k1, k2 or k3."""
    sync_ref_model: bool = False
    """Whether the reference follows the policy: every ``ref_model_sync_steps`` steps it becomes
    alpha · policy + (1 - alpha) · reference, with alpha = ``ref_model_mixup_alpha``."""
    ref_model_sync_steps: int = 100
    ref_model_mixup_alpha: float = 0.5

    # --- pipeline -----------------------------------------------------------------------------------------------
    max_off_policy_steps: int = 1
    """How many optimizer steps older than the trained policy a token may be; 0 = synchronous."""
    max_concurrent: int = 1024
    """Rollouts in flight."""
    max_concurrent_scoring: int | None = None
    """Rollouts being scored at a time."""
    max_concurrent_tools: int | None = None
    """Tool calls at a time."""
    stale_policy: str = "wait"
    """Rollouts at their last chance to be trained: "wait" for them, or train on what is finished first and "drop" them
    once they are too old, which favours short ones."""
    generation_timeout: float = 600.0
    """Seconds to wait for the rollouts of one optimizer step."""
    rollout_timeout: float | None = None
    """Seconds for one rollout; None = ``generation_timeout``."""
    zero_variance: str = "drop"
    """Groups of equal rewards: "drop" and sample others, or "keep" with weight 0."""
    oversample: float = 2.0
    """At most this many times ``batch_size`` rollouts are generated for one step."""
    min_group_fraction: float = 0.75
    """Share of siblings with a known reward that a group needs."""
    max_error_fraction: float = 0.5
    """Share of failed rollouts, over the last four batches, above which training stops."""
    no_signal_steps: int = 8
    """Consecutive batches without any group of differing rewards before training stops; 0 = only warn."""
    skip_solved: bool = False
    """Begin no more rollouts of an example once its groups were solved twice in a row: a mean reward of at least 0.9
    of the best reward seen in the run. When all examples are solved, all are played, and so are rows that a subclass
    chooses."""
    num_env_workers: int = 0
    """Processes that play and score the rollouts to train on, so that the code of the environment (given by its id)
    uses more than one core; 0 = this process."""
    env_worker_backend: str = "process"
    """Where these are: a "process" of this machine, or an actor of a "ray" cluster."""
    deterministic: bool = False
    """Two runs of one seed are identical bit for bit on the same machine; slower generation."""

    # --- which tokens carry loss --------------------------------------------------------------------------------
    mask_env_responses: bool = True
    """Tokens that the policy did not sample carry no loss."""
    mask_truncated_completions: bool = False
    """Rollouts cut by a length limit carry no loss."""
    zero_truncated_completions: bool = False
    """Rollouts cut by a length limit get the reward 0, whatever the rubric says of them."""
    overlong: str = "mask"
    """Rollouts longer than ``max_seq_len`` or ``max_completion_len``, which carry no loss: "mask" lets their rewards
    count in the baseline of their group, "drop" makes them unknown."""
    history: str = "template"
    """What a later turn of a conversation is asked with: the whole conversation as the chat "template" writes it now,
    or the "exact" tokens of the turns so far and what is new. With "exact" a conversation is one sample even where the
    template drops earlier thoughts, and the model sees those thoughts again."""
    require_increasing_context: bool = False
    """Refuse a chat template that rewrites earlier turns, instead of warning: with it every turn of a multi-turn
    rollout is a sample of its own, unless ``history`` is "exact"."""

    # --- inference ----------------------------------------------------------------------------------------------
    inference: str = "auto"
    """Where rollouts are sampled: "embedded" (in this process, on the trained parameters themselves), "vllm" (the
    server at ``vllm_server_host`` and ``_port``), the URL of a vLLM server, several with commas between them, or
    "auto": the server when an address is given or the default one serves this model, else embedded."""
    inference_base_url: str | None = None
    """The URL of the server, or of several, when ``inference`` does not say it."""
    vllm_server_host: str = "0.0.0.0"
    """0.0.0.0 is called as 127.0.0.1."""
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 300.0
    """Seconds to wait for the server to be up."""
    weight_sync: str = "auto"
    """How weights reach a server: lora_dir (adapter files under new names), reload (model files read again), nccl
    (broadcast to its GPUs), ipc (memory of one GPU), or auto: the best of them that can work."""
    sync_dir: str | None = None
    """Folder for the files of lora_dir and reload, on a disk that the server sees; default ``<output_dir>/sync``."""
    sync_timeout: float = 300.0
    """Seconds that one push of weights may take, its repetition included; also how long a server may be away."""
    sync_every: int = 1
    """Optimizer steps per push; at most ``max_off_policy_steps`` + 1."""
    embedded_mode: str = "auto"
    """How the embedded engine decodes: auto, padded, continuous, deterministic."""
    embedded_concurrency: int | None = None
    """Requests that decode together; None = what may be in flight, at most four batches."""
    embedded_num_blocks: int | None = None
    embedded_page_size: int = 32
    """Blocks of the key/value cache of the mode "continuous", and tokens in each; None = as memory allows."""
    embedded_max_batch_tokens: int | None = None
    """Most tokens of one forward pass of the embedded engine; None = 1,024 on a CPU, 8,192 on a GPU, and in the mode
    "continuous" one for each row that decodes, at least 256."""
    tool_call_parser: str = "auto"
    """How tool calls are read from a completion: auto (what the chat template shows), hermes, llama3_json, or none."""
    embedded_threads: int | None = None
    """Threads of torch's CPU kernels, for the whole process."""

    # --- evaluation ---------------------------------------------------------------------------------------------
    eval_num_examples: int = 64
    """-1 = all."""
    eval_rollouts_per_example: int = 1
    eval_sampling_args: dict[str, Any] = field(default_factory=dict)
    eval_required: bool = False
    """Whether an evaluation that fails ends the training; otherwise it is reported and training goes on."""

    # --- logging ------------------------------------------------------------------------------------------------
    run_name: str | None = None
    log_completions: bool = True
    """Write every step's rollouts to ``completions/step-<n>.jsonl``."""
    num_completions_to_print: int = 0
    """Rollouts to print every ``logging_steps``, with ``log_completions``."""
    log_unique_prompts: bool = False
    """Of the siblings of an example, log the first alone."""
    keep_every: int | None = None
    """Checkpoints of every n-th step are kept, whatever ``save_total_limit`` says."""
