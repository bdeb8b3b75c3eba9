"""Write docs/reference/config.md from the models and the key table of ds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ds.config import Config
from ds.config_keys import ACCEPTED, OPEN, OPTIMIZERS_NOT_YET, REFUSED
from ds.config_reader import section_of
from ds.schedules import VALID_LR_SCHEDULES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "config.md"

HEAD = """# The configuration

<!-- Written by tools/config_reference.py; change ds.config and ds.config_keys, then run it again. -->

`ds.initialize(config=...)` reads DeepSpeed's JSON: a dict, the path of a JSON file, or URL-safe base64
of JSON. A dict is never changed. The value `"auto"` and `null` count as absent. Sizes may be whole floats,
such as `5e8`.

Nothing is ignored. A key that DeepSpeed does not have is an error with the nearest known key; one that asks
for something that ds does not do yet is refused by name; one that ds does not need is accepted, with a line
in the log (level INFO) that says why. All mistakes of a configuration are reported together.

Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` any two determine
the third: train = micro * accumulation * data-parallel ranks.
"""


def supported(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Table rows of the keys that ds acts on."""
    for key, field in model.model_fields.items():
        inner = section_of(model, key)
        if inner is None:
            default = (
                "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
            )
            yield f"| `{prefix}{key}` | {default} | {field.description or ''} |"
        else:
            yield f"| `{prefix}{key}` | object | {field.description or ''} |"
            yield from supported(inner, f"{prefix}{key}.")


def shown(value: Any) -> str:
    """A default as JSON writes it."""
    names = {None: "absent", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return names[value]
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:,}" if value else str(value)


def inside(known: Any) -> str:
    """When a refused key is fine."""
    if known is OPEN:
        return "absent, or `enabled: false`"
    if isinstance(known, dict):
        switch = next((key for key in ("enabled", "device") if key in known), None)
        values = {"enabled": "`enabled: false`", "device": '`device: "none"`'}
        return values[switch] if switch else f"{', '.join(f'`{key}`' for key in known)} at their defaults"
    values = known if isinstance(known, tuple) else (known,)
    return ", ".join("absent" if value is None else f"`{value!r}`" for value in values).replace("'", '"')


def refused() -> Iterator[str]:
    """Table rows of the keys that are refused."""
    for path, entry in sorted(REFUSED.items()):
        fine = "absent" if entry.by_presence else inside(entry.keys)
        yield f"| `{path}` | {fine.replace('`False`', '`false`')} | {entry.advice} |"


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        "## Supported\n",
        "| Key | Default | Meaning |\n|---|---|---|",
        *supported(Config),
        f"\nSchedules: {', '.join(VALID_LR_SCHEDULES)}, and those of",
        "`torch.optim.lr_scheduler`. The former give the rates of DeepSpeed, step by step: a warm-up",
        "begins with two steps at its lowest rate.\n",
        "Optimizers: any of `torch.optim`, by name. `Adam` is AdamW unless `optimizer.params.adam_w_mode` is",
        "false, as in DeepSpeed. Not yet: " + ", ".join(OPTIMIZERS_NOT_YET) + ".\n",
        "## Accepted and not needed\n",
        "| Key | Instead |\n|---|---|",
        *(f"| `{path}` | {reason} |" for path, reason in sorted(ACCEPTED.items())),
        "\n## Not yet supported\n",
        "These are fine when they ask for nothing, and an error otherwise.\n",
        "| Key | Fine when | Instead |\n|---|---|---|",
        *refused(),
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the page is out of date"
    )
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    current = PAGE.is_file() and PAGE.read_text() == page()
    if not current:
        print(f"{PAGE.name} is out of date; run: uv run python tools/config_reference.py", file=sys.stderr)
    return 0 if current else 1


if __name__ == "__main__":
    raise SystemExit(main())
