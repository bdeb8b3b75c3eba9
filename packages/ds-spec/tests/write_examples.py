"""Write one example file of every struct for a new release, to be frozen: ``python write_examples.py 0.2.0``.

Existing files are never changed: they show what an older release wrote, and must keep decoding.
"""

import argparse
from pathlib import Path

import ds_spec

EXAMPLES = Path(__file__).parent / "examples"
TENSOR = ds_spec.TensorSpec(name="head.weight", shape=(3, 5), dtype="bfloat16")
PIECE = ds_spec.ShardPiece(
    tensor="head.weight", rank=1, start_numel=8, numel=7, buffer="root", buffer_start_numel=0
)
ITEM = ds_spec.CostItem(name="parameters", time_s=0.25, bytes_held=4096, bytes_sent=2048, compute_flops=10)
FINDING = ds_spec.Finding(
    title="a quarter of the step waits for gathers",
    advice="raise max_gathered_units to 3",
    gain_s=0.05,
    gain_bytes=0,
)
SPECS = (
    ds_spec.MeshSpec(axes=("dp", "tp"), sizes=(4, 2)),
    TENSOR,
    PIECE,
    ds_spec.ShardLayout(world_size=2, tensors=(TENSOR,), pieces=(PIECE,)),
    ds_spec.CommEvent(
        seq=7,
        group="dp",
        op="all_gather",
        bytes_sent=2048,
        bytes_total=4096,
        dtype="bfloat16",
        tag="layers.3 forward",
        begin_s=1.25,
        end_s=1.5,
        call_site="train.py:42",
        rank=1,
    ),
    ds_spec.SpanEvent(name="forward", category="step", begin_s=1.0, end_s=1.5, rank=0),
    ds_spec.MemoryEvent(component="parameters", bytes_held=4096, time_s=1.5, rank=0),
    ds_spec.IoEvent(
        path="step-1/model.safetensors", op="write", num_bytes=4096, begin_s=1.0, end_s=1.5, rank=0
    ),
    ITEM,
    ds_spec.CostReport(source="planned", items=(ITEM,), limit_s=0.2, limit_bytes=4096, findings=(FINDING,)),
    FINDING,
)


def write_examples(folder: Path) -> list[Path]:
    """Write the examples into ``folder``; returns the new files, those that exist are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for spec in SPECS:
        path = folder / f"{spec.__struct_config__.tag}.json"
        if not path.exists():
            path.write_bytes(ds_spec.encode_json(spec, indent=2) + b"\n")
            written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="version of ds-spec that the examples are of, such as 0.2.0")
    for path in write_examples(EXAMPLES / parser.parse_args().release):
        print(path)
