"""The learning curve of one trainer in a separate process, and the warm model that both start from.

    python _learning.py warm '{"folder": ..., "task": "reverse-text", "seed": 0, ...}'
    python _learning.py ours '{...}'
    python _learning.py recipe '{..., "batches": 100, "settings": {...}}'    held-out answers before and after training
    python _learning.py sample '{..., "teacher": FOLDER}'   answers of a trained model to the training examples
    python _learning.py trl  '{...}'                        by the interpreter of TRL's environment
    python _learning.py answers '{..., "model": FOLDER}'    held-out answers of a saved model
    python _learning.py plain '{..., "batches": 100}'       one loop of plain code; tasks of one turn

Both trainers start from ``folder``/model, run the same environment through our embedded engine with
one thread, and print one JSON line: for each step the mean reward of the rollouts that were sampled
for it, the tokens sampled and trained so far, and CPU and wall seconds so far. Everything outside
``settings`` is the default of each.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "arguments": {},
        "settings": {"batch_size": 16, "siblings": 4, "max_tokens": 8, "max_seq_len": 64, "learning_rate": 1e-3},
        "warm_up": {},
    },
    "reverse-text": {
        "arguments": {"unit": "word", "min_chars": 3, "max_chars": 6, "num_train_examples": 2000},
        "settings": {"batch_size": 128, "siblings": 8, "max_tokens": 12, "max_seq_len": 48, "learning_rate": 3e-4},
        "warm_up": {"target": 0.7, "max_steps": 200, "rows_per_step": 64, "learning_rate": 7e-4},
    },
    "curriculum-sums": {
        "arguments": {"min_difficulty": 1, "max_difficulty": 1, "system_prompt": "", "num_train_examples": 2000},
        "settings": {"batch_size": 128, "siblings": 8, "max_tokens": 8, "max_seq_len": 48, "learning_rate": 3e-4},
        "warm_up": {"target": 0.3, "max_steps": 600, "rows_per_step": 64, "learning_rate": 1e-3},
    },
    "two-words": {
        "arguments": {"unit": "word", "min_chars": 3, "max_chars": 4, "num_train_examples": 1000},
        "settings": {"batch_size": 128, "siblings": 8, "max_tokens": 10, "max_seq_len": 64, "learning_rate": 3e-4},
        "warm_up": {"target": 0.55, "max_steps": 300, "rows_per_step": 64, "learning_rate": 7e-4},
    },
    "alphabet-sort": {
        "arguments": {
            "min_turns": 1, "max_turns": 1, "min_names_per_turn": 2, "max_names_per_turn": 2, "similarity_power": 4,
        },
        "settings": {"batch_size": 64, "siblings": 8, "max_tokens": 96, "max_seq_len": 448, "learning_rate": 3e-4},
        "warm_up": {"target": 0.1, "max_steps": 250, "rows_per_step": 16, "learning_rate": 1e-3},
    },
}  # fmt: skip
"""Environments and the settings of both trainers. "digits" needs no warm-up: an untrained model
samples some; the warm-up of "two-words", a task of two turns, has seen the first turn alone."""


class Curve(TrainerCallback):
    """CPU and wall seconds at the end of each step, from the start of training."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(
            (time.process_time() - self._start[0], time.perf_counter() - self._start[1])
        )


def environment(job: dict[str, Any]) -> Any:
    """The task's environment, the same in every process."""
    import verifiers as vf

    def digits(completion: Any, **_: Any) -> float:
        text = completion[-1]["content"] or ""
        return sum(letter.isdigit() for letter in text) / max(1, len(text))

    if job["task"] == "digits":
        rows = [{"question": f"Say {number}."} for number in range(64)]
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[digits]))
    if job["task"] == "two-words":
        return two_words(vf.load_environment("reverse-text", **TASKS["two-words"]["arguments"]))
    arguments = TASKS[job["task"]]["arguments"] | job.get("arguments", {})
    return vf.load_environment(job["task"], **arguments)


def two_words(one_word: Any) -> Any:
    """Reverse a word, then, when that is answered, another one; the reward is the mean of both
    similarities."""
    import verifiers as vf
    from vf_reverse_text.scoring import sequence_ratio

    class TwoWords(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": state["info"]["second"]}]

    def ratios(completion: Any, answer: str, info: Any) -> list[float]:
        replies = [message for message in completion if message["role"] == "assistant"]
        replies += [{"content": ""}] * (2 - len(replies))
        answers = (answer, info["second"][::-1])
        parsed = (one_word.parser.parse_answer([reply]) or "" for reply in replies)
        return [sequence_ratio(text, right) for text, right in zip(parsed, answers, strict=True)]

    def similarity(completion: Any, answer: str, info: Any, state: Any, **_: Any) -> float:
        first, second = ratios(completion, answer, info)
        steps = state["trajectory"]
        # move the first answer's part of the reward to its turn; the sum of a rollout is the same
        if len(steps) == 2:
            steps[0]["reward"], steps[1]["reward"] = first / 2, -first / 2
        return (first + second) / 2

    def both_right(completion: Any, answer: str, info: Any, **_: Any) -> float:
        return float(ratios(completion, answer, info) == [1.0, 1.0])

    def rows(table: Any) -> list[dict[str, Any]]:
        words = [example.row for example in table]
        return [
            {
                "prompt": first["prompt"],
                "answer": first["answer"],
                "info": {"second": second["question"]},
            }
            for first, second in zip(words, [*words[1:], words[0]], strict=True)
        ]

    return TwoWords(
        dataset=rows(one_word.train_table), eval_dataset=rows(one_word.eval_table), parser=one_word.parser,
        rubric=vf.Rubric([similarity, both_right], weights=[1.0, 0.0]), max_turns=2,
    )  # fmt: skip


def config_of(job: dict[str, Any], run: Path, **settings: Any) -> Any:
    from verifiers_trainer.settings.config import RLConfig

    sizes = TASKS[job["task"]]["settings"]
    return RLConfig(
        output_dir=str(run), seed=job["seed"], max_steps=job["steps"], batch_size=sizes["batch_size"],
        rollouts_per_example=sizes["siblings"], max_tokens=sizes["max_tokens"], max_seq_len=sizes["max_seq_len"],
        learning_rate=sizes["learning_rate"], use_lora=False, use_cpu=True, inference="embedded", save_strategy="no",
        **settings,
    )  # fmt: skip


def warm(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """Fine-tune a new model on the format of an answer, as ``vf-train quickstart`` does, and save
    it."""
    from verifiers_trainer.policy.builtin_models import TINY
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.trainer import RLTrainer

    env, settings = environment(job), TASKS[job["task"]]["warm_up"]
    model, tokenizer = get_model_and_tokenizer(TINY, model_kwargs={"seed": job["seed"]})
    outcome = {}
    if settings:
        with RLTrainer(model, env, config_of(job, run), tokenizer) as trainer:
            outcome = train_on_answers(trainer, answer_environment(job["task"], env), settings)
    model.save_pretrained(Path(job["folder"]) / "model")
    tokenizer.save_pretrained(Path(job["folder"]) / "model")
    return outcome


def train_on_answers(trainer: Any, answer_env: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Run supervised steps until the sampled reward reaches the target."""
    from verifiers_trainer.pipeline.warmup import warm_up
    from verifiers_trainer.run.evaluation import run_rollouts

    rows = [example.row for example in trainer.env.train_table[:64]]
    rewards = [0.0]

    def reward() -> float:
        results = run_rollouts(trainer.training_run, trainer.run_context(), inputs=rows)
        rewards.append(results.metadata["avg_reward"])
        return rewards[-1]

    def log(step: int, loss: float, outcome: float | None) -> None:
        if outcome is not None:
            print(
                f"step {step}, loss {loss:.2f}, reward {outcome:.2f}", file=sys.stderr, flush=True
            )

    steps = warm_up(
        trainer.model, trainer.tokenizer, answer_env, reward=reward, probe_every=5, seed=trainer.args.seed, on_step=log,
        **settings,
    )  # fmt: skip
    return {"steps": steps, "reward": rewards[-1]}


def answer_environment(task: str, env: Any) -> Any:
    """An environment of rows with answers, and a parser of their format, for the warm-up."""
    import verifiers as vf

    if task == "two-words":
        return vf.load_environment("reverse-text", **TASKS[task]["arguments"])
    if task != "alphabet-sort":
        return env
    tag = "alphabetical_sorted"
    rows = [
        {"prompt": row["prompt"], "answer": "\n" + row["answer"] + "\n"}
        for row in (e.row for e in env.train_table)
    ]
    return vf.SingleTurnEnv(
        dataset=rows, parser=vf.XMLParser([tag], answer_field=tag), rubric=vf.Rubric()
    )


def ours(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """``RLTrainer`` with its defaults: one step off-policy, groups of zero reward variance
    replaced."""
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.trainer import RLTrainer

    model, tokenizer = get_model_and_tokenizer(str(Path(job["folder"]) / "model"))
    curve, config = Curve(), config_of(job, run, **job.get("ours", {}))
    with RLTrainer(model, environment(job), config, tokenizer, callbacks=[curve]) as trainer:
        trainer.train()
    steps = [row for row in read_metrics(run / METRICS) if "reward/mean" in row]
    return {
        "reward": [row["reward/mean"] for row in steps],
        "sampled": [row["tokens/completion"] for row in steps],
        "trained": [row["tokens/trained"] for row in steps],
        "seconds": curve.seconds,
    }


def sample(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """One answer of ``teacher`` to each training example, saved with its tokens; CPU seconds of
    sampling them."""
    from verifiers_trainer.policy.folder_client import folder_client

    sizes, folder = TASKS[job["task"]]["settings"], Path(job["folder"]) / "answers"
    env, client = environment(job), folder_client(job["teacher"])
    started = time.process_time()
    env.generate_sync(  # the training set
        client=client, model=client.model, results_path=str(folder),
        state_columns=["trajectory"], max_concurrent=128,
        sampling_args={
            "max_tokens": sizes["max_tokens"], "temperature": 1.0, "logprobs": True, "return_token_ids": True,
        },
    )  # fmt: skip
    return {"folder": str(folder), "cpu_s": time.process_time() - started}


EXACT = {
    "reverse-text": "exact_match", "curriculum-sums": "correct_answer", "two-words": "both_right", "digits": "digits",
}  # fmt: skip
"""The metric that is 1 for a right answer and less for any other."""
SIBLINGS = 8
"""Answers to each held-out example, for pass@8."""


def recipe(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """Train on ``batches`` batches with the quickstart's settings but for ``settings``; answers
    before and after."""
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    sizes = TASKS[job["task"]]["settings"]
    settings = {
        "output_dir": str(run), "seed": job["seed"], "batch_size": sizes["batch_size"], "use_lora": False,
        "rollouts_per_example": sizes["siblings"], "max_tokens": sizes["max_tokens"],
        "max_seq_len": sizes["max_seq_len"],
        "learning_rate": sizes["learning_rate"], "lr_scheduler_type": "linear", "warmup_steps": 0.08, "use_cpu": True,
        "zero_truncated_completions": True, "inference": "embedded", "save_strategy": "no",
        "log_completions": False,
    } | job["settings"]  # fmt: skip
    config = RLConfig(**settings)
    config.resolve()
    config.max_steps = job["batches"] * config.steps_per_batch
    model, tokenizer = get_model_and_tokenizer(str(Path(job["folder"]) / "model"))
    curve = Curve()
    with RLTrainer(model, environment(job), config, tokenizer, callbacks=[curve]) as trainer:
        before = held_out(trainer, job["task"])
        trainer.train()
        after = held_out(trainer, job["task"])
        if "save" in job:
            trainer.save_model(job["save"])
    steps = [row for row in read_metrics(run / METRICS) if "reward/mean" in row]
    first_pass = [row for row in steps if row["batch/step"] <= config.updates_per_batch]
    return {
        "before": before, "after": after, "cpu_s": curve.seconds[-1][0], "objective": config.objective(),
        "sampled": sum(row["tokens/completion"] for row in first_pass), "steps": config.max_steps,
        "reward": [row["reward/mean"] for row in first_pass],
        "exact": [row.get(f"reward/{EXACT[job['task']]}") for row in first_pass],
    }  # fmt: skip


def answers(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """Held-out answers of the model in the folder ``model``."""
    return answers_of(job, run, job["model"])


def answers_of(job: dict[str, Any], run: Path, folder: str | Path) -> dict[str, float]:
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.trainer import RLTrainer

    model, tokenizer = get_model_and_tokenizer(str(folder))
    with RLTrainer(model, environment(job), config_of(job, run), tokenizer) as trainer:
        return held_out(trainer, job["task"])


def held_out(trainer: Any, task: str) -> dict[str, float]:
    """Mean reward, share of right answers with its standard error, pass@8, and nats per token, all
    sampled."""
    from verifiers.results.statistics import clustered_stderr
    from verifiers.runtime.json import canonical_json

    env, context = trainer.env, trainer.run_context()
    seen = {canonical_json(example.row["prompt"]) for example in env.train_table}
    table = env.train_table if task == "digits" else env.eval_table
    rows = [
        example.row
        for example in table
        if task == "digits" or canonical_json(example.row["prompt"]) not in seen
    ]
    results = env.generate_sync(
        [row for row in rows for _ in range(SIBLINGS)], client=context.client, model=context.model,
        sampling_args={**context.sampling_args, "return_token_ids": True, "logprobs": True}, max_concurrent=1024,
        seed=1_000_003,
    )  # fmt: skip
    examples = results["example_ids"]
    right = [float(value == 1) for value in results["metrics"][EXACT[task]]]
    solved = {example for example, is_right in zip(examples, right, strict=True) if is_right}
    turns = [turn for state in results["state"] for turn in state.rollout().turns]
    num_tokens = sum(len(turn.completion_ids) for turn in turns)
    return {
        "reward": sum(results["rewards"]) / len(results),
        "exact": sum(right) / len(right),
        "exact_stderr": clustered_stderr(right, examples),
        "pass@8": len(solved) / len(set(examples)),
        "nats": -sum(float(turn.sampler_logprobs.sum()) for turn in turns) / num_tokens,
    }


def changes_of(result: dict[str, Any]) -> list[str]:
    """Before and after, of each number of `held_out`, for a table."""
    before, after = result["before"], result["after"]
    changes = [
        f"{before[key]:.3f} -> {after[key]:.3f}" for key in ("reward", "exact", "pass@8", "nats")
    ]
    changes[1] += f" ± {after['exact_stderr']:.3f}"
    return changes


def trl(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """``GRPOTrainer`` with its defaults but for ``settings``; rollouts of our environment, through
    our bridge."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from verifiers_integrations.trl import make_rollout_func, reward_from_rollout, to_dataset

    sizes, env = TASKS[job["task"]]["settings"], environment(job)
    rollout_func = make_rollout_func(env, max_seq_len=sizes["max_seq_len"])
    source = Path(job["folder"]) / "model"
    rewards: list[float] = []
    tokens: list[int] = []

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns = rollout_func(prompts, trainer)
        tokens.append(sum(map(sum, columns["env_mask"])))
        return columns

    def reward(vf_reward: list[float | None], **columns: Any) -> list[float | None]:
        rewards_known = [value for value in vf_reward if value is not None]
        rewards.append(sum(rewards_known) / len(rewards_known))
        return reward_from_rollout(vf_reward=vf_reward, **columns)

    settings = {
        "max_steps": job["steps"], "per_device_train_batch_size": sizes["batch_size"],
        "learning_rate": sizes["learning_rate"], "lr_scheduler_type": "constant",
    } | job.get("settings", {})  # fmt: skip
    config = GRPOConfig(
        output_dir=str(run), gradient_accumulation_steps=1, num_generations=sizes["siblings"],
        max_completion_length=sizes["max_tokens"], seed=job["seed"], use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    curve = Curve()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(source), reward_funcs=reward, args=config,
        train_dataset=to_dataset(env), processing_class=AutoTokenizer.from_pretrained(source), rollout_func=rollouts,
        callbacks=[curve],
    )  # fmt: skip
    trainer.train()
    rollout_func.close()
    if "save" in job:
        trainer.save_model(job["save"])
    return {"reward": rewards, "sampled": tokens, "trained": tokens, "seconds": curve.seconds}


def plain(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """REINFORCE with the advantage "mean_std", one update per batch, in one loop without anything
    of ours but rewards.

    The same model, rows, batches, schedule and clipping as the recipe ``policy_gradient``,
    on-policy: transformers' ``generate``, one padded batch, AdamW. Nothing is saved, checked or
    logged: the floor of the trainer's CPU time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

    from vf_reverse_text.scoring import sequence_ratio

    sizes = TASKS[job["task"]]["settings"]
    env = environment(job)
    source = Path(job["folder"]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    model, rows = AutoModelForCausalLM.from_pretrained(source), [row.row for row in env.train_table]
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes["learning_rate"], weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(0.08 * job["batches"]), job["batches"]
    )
    per_batch = sizes["batch_size"] // sizes["siblings"]
    siblings = sizes["siblings"]
    end = tokenizer.eos_token_id
    torch.manual_seed(job["seed"])
    order = torch.randperm(len(rows)).tolist() * (1 + job["batches"] * per_batch // len(rows))
    sampled, rewards, started = 0, [], time.process_time()
    for batch in range(job["batches"]):
        chosen = [rows[n] for n in order[batch * per_batch : (batch + 1) * per_batch]]
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in chosen], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        model.eval()
        ids = model.generate(
            **prompts, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=sizes["max_tokens"],
            num_return_sequences=siblings, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        length = prompts["input_ids"].shape[1]
        completions = ids[:, length:]
        ends = (completions == end).int()
        # up to the first end of the turn, which counts
        mask = ((ends.cumsum(1) - ends) == 0).float()
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        answers = [
            env.parser.parse_answer([{"role": "assistant", "content": text}]) or ""
            for text in texts
        ]
        if job["task"] == "reverse-text":
            scores = [
                sequence_ratio(text, chosen[n // siblings]["answer"])
                for n, text in enumerate(answers)
            ]
        else:
            scores = [
                float(text == chosen[n // siblings]["answer"]) for n, text in enumerate(answers)
            ]
        is_whole = ends.sum(1) > 0
        reward = torch.tensor(scores) * is_whole  # as zero_truncated_completions
        groups = reward.view(-1, siblings)
        deviation = groups.std(1, keepdim=True, correction=0)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (deviation + 1e-6)).flatten()
        model.train()
        attention = torch.cat(
            [prompts["attention_mask"].repeat_interleave(siblings, 0), mask.long()], 1
        )
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        hidden = model.model(
            input_ids=ids, attention_mask=attention, position_ids=positions
        ).last_hidden_state
        logits = model.lm_head(hidden[:, length - 1 : -1])
        logprobs = logits.log_softmax(-1).gather(2, completions[..., None])[..., 0]
        loss = -(advantage[:, None] * logprobs * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        sampled += int(mask.sum())
        rewards.append(float(reward.mean()))
    cpu_s = time.process_time() - started
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        before, after = (answers_of(job, run, folder) for folder in (source, saved))
    return {
        "before": before, "after": after, "cpu_s": cpu_s, "sampled": sampled, "steps": job["batches"],
        "reward": rewards,
    }  # fmt: skip


def main() -> None:
    import torch

    trainer, job = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    runs = {
        "warm": warm, "ours": ours, "recipe": recipe, "sample": sample, "trl": trl, "answers": answers, "plain": plain,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = runs[trainer](job, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
