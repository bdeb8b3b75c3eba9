"""The ``ds`` command. Everything heavy is imported inside the commands, so that ``ds --help`` is quick."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train, compress and serve large PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
EXIT_USAGE = 2


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file, or a module's name with -m.")],
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks.", show_default="one per accelerator, else 2"),
    ] = None,
    master_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where ranks meet.", show_default="any free port")
    ] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep what each rank writes here.", show_default="only on failure")
    ] = None,
) -> None:
    """Run a training script on several ranks of this machine.

    Options of ds run go before SCRIPT; all that follows SCRIPT is the script's.

    When a rank fails, the others are ended, and the first to fail and its last words are shown. The exit code
    is that rank's, or 128 + its signal.
    """
    from ds.launch import run_script

    try:
        code = run_script(
            script,
            context.args,
            num_ranks=nproc,
            module=module,
            master_port=master_port,
            log_dir=log_dir,
        )
    except ValueError as error:
        typer.echo(f"ds run: {error}", err=True)
        code = EXIT_USAGE
    raise typer.Exit(code)


@app.command()
def demo(  # noqa: PLR0917 -- typer makes an option of each
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute instead of about three.")] = False,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks.", show_default="one per accelerator, else 2")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Text to train on.", show_default="Python's own language manual"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the trained model.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="as the time allows")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True, help="A model of some seconds.")] = False,
) -> None:
    """Train a small GPT on English text under ZeRO, save it, and show what it writes before and after."""
    from ds.demo.command import run_demo

    try:
        code = run_demo(
            size="tiny" if tiny else "quick" if quick else "full",
            stage=stage,
            num_ranks=ranks,
            text=text,
            out=out,
            steps=steps,
            as_json=as_json,
        )
    except ValueError as error:
        typer.echo(f"ds demo: {error}", err=True)
        code = EXIT_USAGE
    raise typer.Exit(code)


@app.command()
def report(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this environment has: packages, devices, transports, memory, compilers."""
    from ds.report import gather_report, report_json, show_report

    facts = gather_report()
    if as_json:
        typer.echo(report_json(facts))
    else:
        show_report(facts)


def main() -> None:
    """Entry point of the ``ds`` command."""
    app()
