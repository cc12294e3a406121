"""Run ``vf-train``: plan the run, then show, dump or train it, and list the files it wrote."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verifiers.errors import ConfigError, RunMismatch
from verifiers.results.coverage import counts_in_metrics
from verifiers.runtime.redaction import redacted, redacted_text, redacted_words
from verifiers.runtime.terminal import escape_control
from verifiers.storage.files import LOCK_NAME, HeldFile
from verifiers_trainer.cli import launch, tmux
from verifiers_trainer.cli.display import quiet_libraries, show_logs
from verifiers_trainer.cli.plan import FOLDER_FLAGS, Plan, make_plan, printed_settings, step_of
from verifiers_trainer.cli.report import rank
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.adapter_files import adapter_folder
from verifiers_trainer.policy.preparation import members
from verifiers_trainer.run.metrics_files import METRICS, read_metrics
from verifiers_trainer.run.progress import ProgressLine, closing_rows, draw, two_columns

if TYPE_CHECKING:
    from verifiers_trainer.trainer import RLTrainer

MARKS = {True: "ok    ", False: "FAILED", None: "note  "}
"""Result of a preflight check -> its mark."""


@dataclass
class Session:
    """``Session(["@", "tiny-cpu.toml"]).run(result)`` trains, returns the exit code and fills
    ``result``."""

    words: tuple[str, ...]
    output_dir: str | None = None
    resume: str | None = None
    fresh: bool = False
    engine: str = "auto"
    vllm_url: str | None = None
    tmux: str | None = None
    """Name of a tmux session to run in; empty for the default name."""
    dry_run: bool = False
    dump_config: bool = False
    as_json: bool = False
    verbose: bool = False
    quiet: bool = False

    def run(self, result: dict[str, Any]) -> int:
        """Run the command. *Raises* ``UsageError`` and ``RunError``; see ``plan`` and
        ``verifiers_trainer.trainer``."""
        if rank():  # only rank 0 prints
            self.quiet, self.as_json = True, False
        self.console = Console(stderr=True)
        level = logging.DEBUG if self.verbose else logging.ERROR if self.quiet else logging.INFO
        with show_logs(self.console, level), quiet_libraries(not self.verbose):
            return self._run(result)

    def _run(self, result: dict[str, object]) -> int:
        from verifiers_trainer.hf_loop import FORCED
        from verifiers_trainer.run.resume import require_same_run

        # before the plan hides devices
        devices, environment = launch.visible_devices(), dict(os.environ)
        choices = self.words, self.output_dir, self.resume, self.fresh
        if self.dump_config:
            print(printed_settings(*choices), end="")
            return 0
        plan = make_plan(*choices)
        decision = launch.decide(self.engine, self.vllm_url, plan.settings.gpus, devices)
        if self.tmux is not None:
            return self._start_tmux(plan, decision, environment, result)
        if plan.config.server_url is None or self.engine != "auto" or decision.url is not None:
            self._print(f"inference: {launch.where(decision)} ({decision.reason})")
            if (
                decision.launches or len(decision.trainer_devices) > 1
            ) and "LOCAL_RANK" not in os.environ:
                return self._launch(plan, decision, result)
            launch.apply(decision, plan, self.engine)
        self._notices(plan)
        if plan.checkpoint is not None:
            with _naming_the_way_out():
                require_same_run(plan.checkpoint, plan.env, plan.resolved, FORCED)
        if self.dry_run:
            return self._dry_run(plan, result)
        if plan.checkpoint is not None and plan.first_step >= plan.num_steps:
            self._print(
                f"{plan.folder} is already trained: its newest checkpoint is of step"
                f" {plan.first_step}"
            )
            self._describe(plan, result)
            self._close(plan, interrupted=False)
            return 0
        return self._train(plan, result)

    def _start_tmux(
        self,
        plan: Plan,
        decision: launch.Decision,
        environment: Mapping[str, str],
        result: dict[str, object],
    ) -> int:
        """Start this command in a tmux session, and return."""
        words = [*self._child_arguments(), f"--engine={self.engine}"]
        words += [f"--vllm-url={self.vllm_url}"] if self.vllm_url is not None else []
        words += (
            [f"--output-dir={plan.folder}"]
            if self.output_dir is None and self.resume is None
            else []
        )
        name, log = self.tmux or "vf-train", plan.folder / launch.SERVER_LOG
        attach = tmux.start(name, words, environment, log if decision.launches else None)
        self._print(f"training runs in the tmux session {name}: {attach}")
        result.update(run_dir=str(plan.folder), tmux=attach)
        return 0

    def _launch(self, plan: Plan, decision: launch.Decision, result: dict[str, object]) -> int:
        """Train in a child process beside a server; ``--json`` prints the object of the child."""
        code, stdout = launch.run(plan, decision, self._child_arguments(), self._print)
        if self.as_json and stdout.strip():
            result.update(json.loads(stdout.strip().splitlines()[-1]))
        elif stdout:
            print(stdout, end="")
        return code

    def _child_arguments(self) -> list[str]:
        """Return the arguments of this call for the child that trains."""
        options = {"--output-dir": self.output_dir, "--resume": self.resume}
        words = [
            *self.words,
            *(f"{flag}={value}" for flag, value in options.items() if value is not None),
        ]
        flags = {
            "--fresh": self.fresh,
            "--dry-run": self.dry_run,
            "--json": self.as_json,
            "-v": self.verbose,
        }
        return words + [flag for flag, enabled in {**flags, "-q": self.quiet}.items() if enabled]

    # --- modes ------------------------------------------------------------------------------------

    def _dry_run(self, plan: Plan, result: dict[str, object]) -> int:
        """Show the run and run the preflight checks; return 2 when a check fails."""
        from verifiers_trainer.cli.preflight import preflight
        from verifiers_trainer.trainer import RLTrainer

        config = plan.config.private_copy()
        with tempfile.TemporaryDirectory() as folder:  # transformers creates output_dir
            config.output_dir = folder
            with RLTrainer(plan.settings.model, plan.env, config) as trainer:
                rows = [*plan_rows(plan), *model_rows(trainer)]
                model, tokenizer = trainer.model, trainer.tokenizer
            if not self.as_json:
                print(two_columns(rows))
            findings = []
            checks = (
                ()
                if config.saved_runs
                else preflight(model, plan.env, config, Path(folder), tokenizer)
            )
            # of saved runs the rollouts are read by now, and nothing is sampled
            for finding in checks:
                findings.append(finding)
                if not self.as_json:
                    print(
                        f"{MARKS[finding.ok]} "
                        f" {escape_control(f'{finding.name}: {finding.message}')}"
                    )
        result.update(run_dir=str(plan.folder), step=plan.first_step, metrics=None, plan=dict(rows))
        result["checkpoint"] = str(plan.checkpoint) if plan.checkpoint else None
        result["checks"] = [{"name": f.name, "ok": f.ok, "said": f.message} for f in findings]
        return 2 if any(finding.ok is False for finding in findings) else 0

    def _train(self, plan: Plan, result: dict[str, object]) -> int:
        from verifiers_trainer.trainer import RLTrainer

        with self._folder(plan):
            self._print(two_columns(plan_rows(plan)))
            if project := plan.settings.config.get("project"):
                # where transformers' reporter looks for it
                os.environ.setdefault("WANDB_PROJECT", project)
            self._print(f"loading {plan.settings.model}")
            plan.config.disable_tqdm = True  # this command shows the progress itself
            with RLTrainer(plan.settings.model, plan.env, plan.config) as trainer:
                progress = ProgressLine(trainer, self.console, self.quiet)
                trainer.add_callback(progress)

                trainer.interruption.announce = lambda: self._print(
                    "stopping: the last whole step is saved; press Ctrl-C again to exit immediately"
                )
                trainer.interruption.leave = progress.stop
                try:
                    with _naming_the_way_out():
                        trainer.train(
                            resume_from_checkpoint=str(plan.checkpoint) if plan.checkpoint else None
                        )
                except (KeyboardInterrupt, SystemExit):
                    if not trainer.exit_code:
                        raise
                except RunMismatch:
                    raise
                except Exception:  # whatever ended the run: says what is saved, and raises it again
                    if (
                        newest := checkpoint_files.newest_valid(plan.folder)
                    ) and newest != plan.checkpoint:
                        self._print(
                            f"{newest} is valid: {self._resume_command(plan)} resumes from it"
                        )
                    if not rank() and (picture := self._draw(plan)):
                        self._print(f"the learning curve is {picture}")
                    raise
                finally:
                    progress.stop()
                    self._describe(plan, result)
                result["solved"] = trainer.is_complete
            is_over = bool(trainer.exit_code)
            self._close(plan, interrupted=is_over, solved=trainer.is_complete)
        return trainer.exit_code

    @contextmanager
    def _folder(self, plan: Plan) -> Iterator[None]:
        """Lock the folder of the run. *Raises* ``RunBusy``, ``ConfigError`` when it cannot be
        written.

        Of several ranks, rank 0 holds the lock.
        """
        folder = plan.folder
        if rank():
            yield
            return
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = HeldFile(folder / LOCK_NAME)
            lock.write_holder()
        except OSError as error:
            raise ConfigError(
                f"cannot write to {folder}: {error.strerror}; choose another --output-dir"
            ) from error
        try:
            yield
        finally:
            lock.release()
            _remove_unused(folder, created)

    # --- messages ---------------------------------------------------------------------------------

    def _print(self, message: str) -> None:
        if not self.quiet:
            self.console.print(
                redacted_text(message), markup=False, highlight=False, soft_wrap=True
            )

    def _notices(self, plan: Plan) -> None:
        by_reason: dict[str, list[str]] = {}
        for key, reason in plan.settings.ignored:
            if plan.config.server_url is None or not key.startswith(("inference.", "trainer.gpus")):
                by_reason.setdefault(reason, []).append(key)
        for reason, keys in by_reason.items():
            self._print(f"ignored: {', '.join(keys)} ({reason})")

    def _describe(self, plan: Plan, result: dict[str, object]) -> None:
        """Fill the keys of ``--json``."""
        newest = checkpoint_files.newest_valid(plan.folder)
        metrics = plan.folder / METRICS
        lines = read_metrics(metrics) if metrics.is_file() else []
        steps = [line for line in lines if "reward/mean" in line]
        result.update(
            run_dir=str(plan.folder),
            step=steps[-1]["step"] if steps else 0,
            metrics=steps[-1] if steps else None,
            coverage=counts_in_metrics(lines),
            checkpoint=str(newest) if newest else None,
        )

    def _close(self, plan: Plan, *, interrupted: bool, solved: bool = False) -> None:
        if rank():
            return
        newest = checkpoint_files.newest_valid(plan.folder)
        if solved:
            self._print(
                "\nsolved: training ended before its last step, because all rollouts have the best"
                " reward"
            )
            commands = []
        elif not interrupted:
            self._print("")
            commands = [f"{self._resume_command(plan, 2 * plan.num_steps)}    # continues training"]
            if newest is not None:
                commands.append(
                    f"{evaluation_command(plan, newest)}    # evaluates the trained model"
                )
        elif newest is not None:
            self._print(
                f"\ninterrupted; step {step_of(newest)} is saved, and the command below resumes"
                " from it"
            )
            commands = [self._resume_command(plan)]
        else:
            self._print("\ninterrupted before the end of the first step; nothing is saved")
            commands = []
        table = two_columns(closing_rows(plan.folder, newest, self._draw(plan), commands))
        # stdout is for the object of --json alone, if that is asked for
        print(redacted_text(table), file=sys.stderr if self.as_json else sys.stdout)

    def _resume_command(self, plan: Plan, max_steps: int | None = None) -> str:
        """Return the command that continues the run in this folder, optionally with another
        ``max_steps``."""
        words, flag = list(self.words), "--trainer.args.max_steps"
        if max_steps is not None:
            if flag in words:
                del words[words.index(flag) : words.index(flag) + 2]
            words = [
                *(word for word in words if not word.startswith(f"{flag}=")),
                flag,
                str(max_steps),
            ]
        folder_source = plan.settings.locations.get("output_dir")
        if folder_source in FOLDER_FLAGS or (
            folder_source is None and "run_name" not in plan.settings.config
        ):
            words += ["--output-dir", str(plan.folder)]
        return shlex.join(["vf-train", *redacted_words(words)])

    def _draw(self, plan: Plan) -> Path | None:
        return draw(plan.folder, f"{plan.settings.env_id}: {plan.settings.model}")


@contextmanager
def _naming_the_way_out() -> Iterator[None]:
    """Add to a refused checkpoint the options of this command."""
    try:
        yield
    except RunMismatch as error:
        raise RunMismatch(f"{error} (--output-dir, or --fresh)", **error.facts) from error


def evaluation_command(plan: Plan, checkpoint: Path) -> str:
    """Return the command that evaluates a checkpoint in the environment of the run."""
    env = plan.settings.environments[0]
    arguments = ["-a", json.dumps(env.args)] if env.args else []
    max_tokens = plan.resolved.max_tokens
    limit = ["-t", str(max_tokens)] if max_tokens else []
    return shlex.join(["vf-eval", env.id, "-m", str(checkpoint), *arguments, *limit])


def _remove_unused(folder: Path, created: Sequence[Path]) -> None:
    """Remove the folders that this run created, the innermost first, when it wrote nothing but its
    lock."""
    if created and [path.name for path in folder.iterdir()] == [LOCK_NAME]:
        (folder / LOCK_NAME).unlink()
        for path in created:
            if any(path.iterdir()):
                break
            path.rmdir()


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the summary of the run that is known without the model."""
    config, settings = plan.resolved, plan.settings
    group, batch, micro = config.rollouts_per_example, config.batch_size, config.micro_batch_size
    calls = [
        f"{env.id}({', '.join(f'{name}={value!r}' for name, value in redacted(env.args).items())})"
        for env in settings.environments
    ]
    sampling = ", ".join(f"{name} {value}" for name, value in config.sampling().items())
    goes_on = adapter_folder(settings.model) is not None and not config.merge_adapter
    further = ": the adapter of the model, trained further" if goes_on else ""
    if config.lora_per_role:
        roles = [
            role for member in members(plan.env) for role in getattr(member, "trained_roles", ())
        ]
        further = f": an adapter for each of {', '.join(dict.fromkeys(roles))}"
    rows = [
        ("model", settings.model),
        ("environment", " + ".join(calls)),
        (
            "batch",
            f"{batch} rollouts = {batch // group} examples x {group}, in micro-batches of {micro}",
        ),
        ("sampling", f"{sampling}, at most {config.max_seq_len} tokens per conversation"),
        ("objective", f"{config.objective()}; learning rate {config.learning_rate:g}"),
        (
            "weights",
            (
                f"LoRA rank {config.lora_rank}, alpha {config.lora_alpha}{further}"
                if config.use_lora
                else "all"
            ),
        ),
        (
            "steps",
            f"{plan.first_step} -> {plan.num_steps}, a checkpoint every {config.save_steps:g}",
        ),
        ("folder", str(plan.folder)),
        ("starts from", str(plan.checkpoint or "the beginning")),
    ]
    return rows + [
        (key.rpartition(".")[2], f"derived: {reason}") for key, reason in settings.derived
    ]


def model_rows(trainer: RLTrainer) -> list[tuple[str, str]]:
    """Return the part of the summary that needs the loaded model and environment."""
    model: Any = trainer.model
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    train, held_out = trainer.env.train_table, trainer.env.eval_table
    examples = ", ".join(
        f"{len(table)} {name}"
        for name, table in (("for training", train), ("held out", held_out))
        if table is not None
    )
    return [
        (
            "parameters",
            f"{sum(p.numel() for p in parameters):,}, {trained:,} of them trained; {kinds}",
        ),
        ("device", str(trainer.args.device)),
        ("tokenizer", f"{len(trainer.tokenizer):,} tokens"),
        ("examples", examples),
        (
            "rewards",
            ", ".join(getattr(f, "__name__", str(f)) for f in trainer.env.get_reward_funcs()),
        ),
    ]
