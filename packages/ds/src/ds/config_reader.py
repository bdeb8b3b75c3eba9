"""From a dict, a JSON file or base64 to a checked Config; every mistake is named, all at once."""

import base64
import binascii
import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ds.config import Batch, Config, ConfigError, solve_batch
from ds.config_checks import check_combinations
from ds.config_keys import ACCEPTED, REFUSED, requests, unknown_inside
from ds.rank_log import log_once

logger = logging.getLogger(__name__)

ALIASES = {"bfloat16": "bf16"}
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NAMES_SHOWN = 6
SOURCE_SHOWN = 200
Source = Mapping[str, Any] | str | Path


def read_config(source: Source, *, data_parallel_size: int | None = None) -> Config:
    """Read and check a configuration; a dict that is given stays as it is.

    ``"auto"`` and ``null`` count as absent.

    Args:
        source: a dict, the path of a JSON file, or URL-safe base64 of JSON.
        data_parallel_size: ranks that share a batch; ``None`` leaves the batch triple unchecked.

    Raises:
        ConfigError: with one line per mistake: the path of the key, what was expected, what to do.
    """
    raw = _without_auto(load(source))
    mistakes: list[str] = []
    config = _parse(_Walk(mistakes).kept(raw), mistakes)
    mistakes += _mistakes_of(lambda: _check_names(config))
    mistakes += check_combinations(config)
    if data_parallel_size is not None and (not mistakes or any(key in raw for key in BATCH_KEYS)):
        size = data_parallel_size
        mistakes += _mistakes_of(lambda: solve_batch(config, size))
    if mistakes:
        raise ConfigError(*mistakes)
    if "gradient_clipping" not in raw:
        log_once(
            logger,
            logging.INFO,
            "gradient_clipping is not set: DeepSpeed's default of 1.0 applies; set it to 0 for none",
        )
    return config


def load(source: Source) -> dict[str, Any]:
    """The JSON object as it is written.

    Raises:
        ConfigError: there is no such file, it is not a JSON object, or it has a key twice.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config must be a dict, a path or base64 of JSON, got {type(source).__name__}")
    text, name = _text_of(source)
    try:
        loaded = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error}; comments and commas at the end are not JSON either"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def _text_of(source: str | Path) -> tuple[str, str]:
    if _is_file(source):
        try:
            return Path(source).read_text(encoding="utf-8-sig"), str(source)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read as UTF-8 text: {error}") from None
    try:
        decoded = base64.b64decode(str(source), altchars=b"-_", validate=True).decode()
        if decoded.lstrip().startswith("{"):
            return decoded, "the base64 configuration"
    except (binascii.Error, ValueError):
        pass  # neither; said below
    shown = str(source)[:SOURCE_SHOWN]
    raise ConfigError(f"config must be a dict, a path or base64 of a JSON object; there is no file '{shown}'")


def _is_file(source: str | Path) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # longer than a path may be, or with a zero byte: base64, perhaps
        return False


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"{', '.join(repeated)}: given twice in one object; keep one")
    return dict(pairs)


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_auto(item) for key, item in value.items() if not _is_auto(item)}
    return value


def _is_auto(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


class _Walk:
    """Goes through a configuration key by key and sorts out what the models do not know."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes

    def kept(
        self, raw: Mapping[str, Any], model: type[BaseModel] | None = Config, prefix: str = ""
    ) -> dict[str, Any]:
        """What the model acts on; the rest is accepted with a line in the log, or noted as a mistake."""
        fields = model.model_fields if model is not None else {}
        kept: dict[str, Any] = {}
        for written, value in raw.items():
            key = ALIASES.get(written, written) if not prefix else written
            path = f"{prefix}{key}"
            if key in kept:
                self.mistakes.append(f"{written}: the same as {key}, which is given too; keep one")
            elif key in fields:
                inner = section_of(model, key)
                nested = inner is not None and isinstance(value, Mapping)
                kept[key] = self.kept(value, inner, f"{path}.") if nested else value
            elif isinstance(value, Mapping) and any(
                name.startswith(f"{path}.") for name in (*ACCEPTED, *REFUSED)
            ):
                self.kept(value, None, f"{path}.")
            else:
                self._sort(path, value)
        return kept

    def _sort(self, path: str, value: Any) -> None:
        if path in ACCEPTED:
            log_once(logger, logging.INFO, "%s is accepted and not needed: %s", path, ACCEPTED[path])
        elif path in REFUSED:
            entry = REFUSED[path]
            self.mistakes += [
                f"{asked}: not yet supported by ds 0.1; {entry.advice}"
                for asked in requests(value, entry, path)
            ]
            for unknown, known in unknown_inside(value, entry, path):
                self._unknown(unknown, known)
        elif path in known_paths():
            # Frameworks write "zero_optimization.reduce_bucket_size" at the top level; DeepSpeed ignores it.
            log_once(logger, logging.INFO, "%s is ignored: a key with a dot says nothing; nest it", path)
        else:
            self._unknown(path, list(known_at(path.rpartition(".")[0])))

    def _unknown(self, path: str, known: list[str]) -> None:
        parent, _, key = path.rpartition(".")
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if close:
            hint = f"did you mean {parent}{'.' if parent else ''}{close[0]}?"
        elif len(known) <= NAMES_SHOWN:
            hint = f"known here: {', '.join(known)}"
        else:
            hint = "docs/reference/config.md lists the known ones"
        self.mistakes.append(f"{path}: unknown key; {hint}")


def _parse(kept: dict[str, Any], mistakes: list[str]) -> Config:
    """The configuration; wrong top-level keys are noted and fall back to their defaults."""
    if isinstance(kept.get("zero_optimization"), bool):
        if kept["zero_optimization"]:
            mistakes.append(
                'zero_optimization: must be an object, got true; DeepSpeed takes it as {"stage": 1}'
            )
        del kept["zero_optimization"]
    try:
        return Config.model_validate(kept)
    except ValidationError as error:
        items = error.errors()
        mistakes += dict.fromkeys(map(_describe, items))
        wrong = {item["loc"][0] for item in items}
        return Config.model_validate({key: value for key, value in kept.items() if key not in wrong})


def _describe(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{path}: missing; it is required"
    if item["type"] == "model_type":
        return f"{path}: must be an object, got {item['input']!r}"
    return f"{path}: {item['msg'].replace('Input should be', 'must be')}, got {item['input']!r}"


def _check_names(config: Config) -> None:
    """Names and arguments of optimizer and scheduler; torch is loaded only when one is there."""
    mistakes: list[str] = []
    if config.optimizer is not None:
        from ds.optimizers import check_optimizer

        mistakes += check_optimizer(config.optimizer)
    if config.scheduler is not None:
        from ds.schedules import check_scheduler

        mistakes += check_scheduler(config.scheduler)
    if mistakes:
        raise ConfigError(*mistakes)


def _mistakes_of(check: Callable[[], Batch | None]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return list(error.reasons)
    return []


def section_of(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The model of a section, ``None`` for a plain key."""
    annotation = model.model_fields[key].annotation if model is not None else None
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def supported_paths(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Paths of the keys that ds acts on, sections before what is in them."""
    for key in model.model_fields:
        inner = section_of(model, key)
        yield f"{prefix}{key}"
        if inner is not None:
            yield from supported_paths(inner, f"{prefix}{key}.")


def known_paths() -> dict[str, str]:
    """Every path with its standing: supported, accepted or refused."""
    refused = dict.fromkeys(
        (path for name, entry in REFUSED.items() for path in _inner(name, entry.keys)), "refused"
    )
    return dict.fromkeys(supported_paths(), "supported") | dict.fromkeys(ACCEPTED, "accepted") | refused


def _inner(path: str, known: Any) -> Iterator[str]:
    yield path
    if isinstance(known, dict):
        for key, item in known.items():
            yield from _inner(f"{path}.{key}", item)


def known_at(section: str) -> Iterator[str]:
    """Names of the keys inside a section, or of the top level for ``""``."""
    prefix = f"{section}." if section else ""
    inside = (path.removeprefix(prefix) for path in known_paths() if path.startswith(prefix))
    return iter(
        dict.fromkeys(path.partition(".")[0] for path in (*inside, *(ALIASES if not section else ())))
    )
