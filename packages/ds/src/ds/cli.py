"""The ``ds`` command."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train, compress and serve large PyTorch models.", no_args_is_help=True, add_completion=False
)

QUICK_STEPS = 60
FULL_STEPS = 330
TINY = {"vocabulary": 400, "context": 32, "width": 32, "depth": 2, "heads": 2}


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
        int | None, typer.Option("--nproc", min=1, help="Ranks; default one per accelerator, else 2.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
) -> None:
    """Run a training script on several ranks of this machine."""
    from ds.launch import run_script

    raise typer.Exit(run_script(script, context.args, num_ranks=nproc, module=module))


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute instead of about three.")] = False,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    ranks: Annotated[int | None, typer.Option(min=1, help="Default one per accelerator, else 2.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Your own text to train on.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to save the model.")] = Path("runs/demo"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON on the last line.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True, help="A model for tests.")] = False,
) -> None:
    """Train a small GPT on English text under ZeRO, save it, and show what it writes."""
    import msgspec

    from ds.demo.train import DemoOptions
    from ds.launch import run_script

    options = DemoOptions(
        stage=stage,
        steps=steps or (QUICK_STEPS if quick else FULL_STEPS),
        batch_size=8,
        text=str(text.resolve()) if text else None,
        out=str(out),
        model=TINY if tiny else {},
    )
    with tempfile.TemporaryDirectory(prefix="ds-demo-") as folder:
        result_file = Path(folder) / "result.json"
        arguments = [msgspec.json.encode(options).decode(), str(result_file)]
        code = run_script("ds.demo.rank", arguments, num_ranks=ranks, module=True)
        if code:
            raise typer.Exit(code)
        result = json.loads(result_file.read_text())
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(
            f"held-out loss {result['loss_first']:.3f} -> {result['loss_last']:.3f}, "
            f"{result['tokens_per_s']:,.0f} tokens/s; saved to {out}"
        )


@app.command()
def report(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this environment has."""
    from ds.report import gather_report, show_report

    if as_json:
        typer.echo(json.dumps(gather_report()))
    else:
        show_report()


def main() -> None:
    """Entry point of the ``ds`` command."""
    app()
