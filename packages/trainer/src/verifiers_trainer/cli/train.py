"""``vf-train`` (and ``vf-rl``): train a model in an environment, from a TOML file and dotted
overrides.

    vf-train @ configs/vf-train/tiny-cpu.toml --trainer.args.max_steps 20
    vf-train quickstart

This module reads options; ``plan`` plans the run, ``verifiers_trainer.trainer`` trains. Torch is
imported only after options and files have been read.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from verifiers.cli.common.streams import EPILOG, UNEXPECTED
from verifiers.errors import ConfigError
from verifiers.runtime.terminal import escape_control
from verifiers_trainer.cli import ablation, capacity
from verifiers_trainer.cli.first_checks import check_first
from verifiers_trainer.cli.report import finish
from verifiers_trainer.cli.sources import make_importable

ABOUT = """Train a model in an environment by reinforcement learning.

\b
  vf-train configs/vf-train/tiny-cpu.toml
  vf-train @ FILE.toml --trainer.args.max_steps 20 --env.args.max_turns=5
  vf-train --model builtin:tiny --env.id reverse-text --trainer.args.batch_size 64
  vf-train quickstart          a complete run on a laptop CPU, in minutes

Any key of the file can be set as --section.key VALUE; the command line has precedence, then later files.
Repeat the command to continue a stopped run: it resumes from the newest valid checkpoint in the output folder.
"""


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and all around it without garbage collection, and keep what that makes out of
    later collections.

    It is a million objects that live as long as the process: collections would walk through them
    many times during the import, and again in every training. A program that has imported torch
    itself decides about its own objects.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Command(click.Command):
    """Allows ``--resume`` and ``--tmux`` without a value: click would take a
    following ``@`` as it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        pairs = zip(args, [*args, "-"][1:], strict=True)
        optional = ("--resume", "--tmux")
        alone = (
            f"{word}=" if word in optional and after[:1] in ("@", "-") else word
            for word, after in pairs
        )
        return super().parse_args(ctx, list(alone))


def _common(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options of both commands."""
    for option in (
        click.version_option(package_name="verifiers-trainer", prog_name="vf-train"),
        click.option("-q", "--quiet", is_flag=True, help="Print only errors and results."),
        click.option("-v", "--verbose", is_flag=True, help="Print debug messages and tracebacks."),
        click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object on stdout at the end."
        ),
    ):
        command = option(command)
    return command


@click.command(
    "vf-train",
    cls=_Command,
    help=ABOUT,
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="@ FILE.toml [--section.key VALUE]..."
)
@click.option(
    "--output-dir", metavar="DIR", help="Folder of the run; default outputs/<run_name or the time>."
)
@click.option(
    "--resume",
    metavar="[PATH]",
    help="Resume from a checkpoint, which must exist; default: if there is one.",
)
@click.option(
    "--fresh", is_flag=True, help="Start a new run; move the content of the folder aside."
)
@click.option(
    "--accept-changed-code",
    is_flag=True,
    help="Resume although the environment or own functions changed; recorded.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "embedded", "vllm"]),
    default="auto",
    show_default=True,
    help=(
        "Sample in this process, or on a vLLM server started beside it; auto: by the number of"
        " devices."
    ),
)
@click.option(
    "--vllm-url",
    metavar="URL",
    help="Sample on this running vLLM server (several: commas between them).",
)
@click.option(
    "--tmux",
    metavar="[NAME]",
    help=(
        "Run in a tmux session, with a pane for the trainer and one for the server's log; default"
        " name: vf-train."
    ),
)
@click.option("--cwd", metavar="DIR", help="Folder to run in; paths are relative to it.")
@click.option("--dry-run", is_flag=True, help="Show the run, run the preflight checks, and stop.")
@click.option(
    "--plan",
    is_flag=True,
    help="Show the expected time and memory, and the bottleneck, and stop; loads nothing.",
)
@click.option(
    "--plan-on", metavar="DEVICE", help="With --plan: H100, RTX 4090, T4, …; default cpu."
)
@click.option(
    "--plan-from", metavar="RUN", help="With --plan: take the speeds that this run measured."
)
@click.option(
    "--plan-with",
    metavar="NAME=VALUE",
    multiple=True,
    help="With --plan: replace an input of the table.",
)
@click.option(
    "--verify",
    metavar="RUN",
    help="Score saved rollouts of this run with the checkpoints that sampled them, and stop.",
)
@click.option(
    "--export",
    nargs=2,
    metavar="FOLDER OUT",
    help=(
        "Write the model of a run's newest checkpoint, or of this checkpoint, to the new folder OUT"
        " for transformers, peft and vLLM, and stop."
    ),
)
@click.option("--merged", is_flag=True, help="With --export: merge an adapter into its base model.")
@click.option("--dump-config", is_flag=True, help="Print the settings in full as TOML, and stop.")
@click.option(
    "--schema", is_flag=True, help="Print the JSON schema of a file, for editors, and stop."
)
@_common
@click.pass_context
def train_command(
    context: click.Context,
    words: tuple[str, ...],
    cwd: str | None,
    accept_changed_code: bool,
    as_json: bool,
    verbose: bool,
    plan: bool,
    plan_on: str | None,
    plan_from: str | None,
    plan_with: tuple[str, ...],
    verify: str | None,
    export: tuple[str, str] | None,
    merged: bool,
    schema: bool,
    **options: Any,
) -> None:
    if accept_changed_code:
        words += ("--trainer.args.accept_changed_code", "true")

    def body(result: dict[str, object]) -> int:
        if cwd is not None:
            try:
                os.chdir(cwd)
            except OSError as error:
                raise ConfigError(f"--cwd: cannot run in {cwd}: {error.strerror}") from error
        if not plan and (plan_on or plan_from or plan_with):
            raise ConfigError("--plan-on, --plan-from and --plan-with need --plan")
        if verify is not None:
            return _verify(verify, result, as_json)
        if merged and export is None:
            raise ConfigError("--merged needs --export")
        if export is not None:
            return _export(*export, merged, words, result, as_json)
        if schema:
            return _show_schema(words, result, as_json)
        make_importable(words)
        # before torch is loaded, which takes seconds
        check_first(words, imports=not options["dump_config"])
        if plan:
            samplers = ["samplers=0"] if options["engine"] == "embedded" else []
            return _show_plan(
                capacity.capacity_plan(words, plan_on, plan_from, [*samplers, *plan_with]),
                result,
                as_json,
            )
        if (runs := ablation.combinations(words)) and not options["dump_config"]:
            return _ablate(runs, words, options, verbose, as_json, result)
        with importing():
            from verifiers_trainer.cli.session import Session

        return Session(words, verbose=verbose, as_json=as_json, **options).run(result)

    context.exit(finish(body, verbose=verbose, as_json=as_json))


def _ablate(
    runs: Sequence[ablation.Combination],
    words: Sequence[str],
    options: dict[str, Any],
    verbose: bool,
    as_json: bool,
    result: dict[str, object],
) -> int:
    """Train the combinations of a file, each in a process of its own."""
    for name in ("resume", "tmux"):
        if options[name] is not None:
            raise ConfigError(f"--{name} is of one run, and the file has an [[ablation]]")
    flags = [f"--engine={options['engine']}"]
    flags += [f"--vllm-url={options['vllm_url']}"] if options["vllm_url"] is not None else []
    flags += [f"--{n.replace('_', '-')}" for n in ("fresh", "dry_run", "quiet") if options[n]]
    flags += ["-v"] if verbose else []

    def echo(line: str, file: TextIO = sys.stderr) -> None:
        print(escape_control(line), file=file, flush=True)

    answer = partial(echo, file=sys.stderr if as_json else sys.stdout)
    return ablation.run_all(runs, words, flags, options["output_dir"], echo, answer, result)


def _verify(run: str, result: dict[str, object], as_json: bool) -> int:
    with importing():
        from verifiers_trainer.run import proof
    rows = proof.verify(Path(run))
    result.update(run_dir=run, verified=dict(rows))
    if not as_json:
        print("\n".join(f"{name}: {sentence}" for name, sentence in rows))
    return 0


def _export(
    source: str,
    target: str,
    merged: bool,
    words: Sequence[str],
    result: dict[str, object],
    as_json: bool,
) -> int:
    if words:
        raise ConfigError(
            f"--export takes a folder and a new folder, and no settings: {' '.join(words)}"
        )
    with importing():
        from verifiers_trainer.policy import exporting
    folder = exporting.export(source, Path(target), merged=merged)
    result.update(exported=target, checkpoint=str(folder))
    if not as_json:
        print(escape_control(f"{target} has the model of {folder}"))
    return 0


def _show_schema(words: Sequence[str], result: dict[str, object], as_json: bool) -> int:
    if words:
        raise ConfigError(f"--schema takes no settings: {' '.join(words)}")
    from verifiers_trainer.cli.schema import train_schema

    result["file_schema"] = train_schema()
    if not as_json:
        print(result["file_schema"])
    return 0


def _show_plan(plan: capacity.CapacityPlan, result: dict[str, object], as_json: bool) -> int:
    result["plan"] = plan.to_dict()
    if not as_json:
        print(escape_control(capacity.plan_text(plan)))
    return 0 if plan.fits else UNEXPECTED


@click.command(
    "vf-train quickstart", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--env",
    "environment",
    metavar="ID",
    default="reverse-text",
    show_default=True,
    help="One of reverse-text, curriculum-sums and reasoning-gym.",
)
@click.option(
    "--output-dir",
    metavar="DIR",
    default="outputs/quickstart",
    show_default=True,
    help="Folder of the run.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the model, the data and the sampling.",
)
@click.option(
    "--batches",
    "--steps",
    "batches",
    type=click.IntRange(min=1),
    help="Batches of 128 rollouts; the default depends on the environment.",
)
@click.option(
    "--loss",
    help=(
        "A name of verifiers_trainer.algorithm.losses.OBJECTIVES, in place of the environment's"
        " recipe."
    ),
)
@_common
@click.pass_context
def quickstart_command(
    context: click.Context,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    output_dir: str,
    **options: Any,
) -> None:
    """Train a tiny model in a real environment on a laptop CPU, in two to five minutes."""

    def body(result: dict[str, object]) -> int:
        from rich.console import Console

        with importing():
            from verifiers_trainer.cli import quickstart

        progress = Console(stderr=True, quiet=quiet)
        results = Console(stderr=as_json)
        summary = quickstart.run(output_dir, console=progress, results=results, **options)
        result.update(
            run_dir=summary["output_dir"],
            step=summary["steps"],
            metrics=summary["after"],
            checkpoint=None,
        )
        return 0

    context.exit(finish(body, verbose=verbose, as_json=as_json))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["quickstart"]:
        quickstart_command.main(words[1:], prog_name="vf-train quickstart")
    else:
        train_command.main(words, prog_name="vf-train")


if __name__ == "__main__":
    main()
