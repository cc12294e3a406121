"""``python -m verifiers_integrations.prime_rl FILE… --era v0.4 --out DIR``: convert run files to
prime-rl."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from verifiers.errors import VerifiersError
from verifiers_integrations.prime_rl import ERAS, emit, read


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--era",
    type=click.Choice(ERAS),
    default=ERAS[0],
    show_default=True,
    help="Version of the files.",
)
@click.option(
    "--out", "out_dir", type=click.Path(file_okay=False, path_type=Path), default=Path(".")
)
def main(files: tuple[Path, ...], era: str, out_dir: Path) -> None:
    """Write the run in FILES (a file of vf-train, or files of prime-rl) as files of prime-rl into a
    folder."""
    try:
        emit(files[0] if len(files) == 1 else read(*files), era, out_dir)
    except VerifiersError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
