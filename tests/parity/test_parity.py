"""Trident on one process against what PyTorch computed in fp64 from the same weights and batches (reference.py)."""
import array
import json
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multi")]

from cases import CASES, corpus  # noqa: E402
from compare import weight_failures  # noqa: E402
from trident import metrics, run, write_config, write_tokens  # noqa: E402

# Relative, by precision: loss of the first step, of each step, gradient norm of each step.
BOUNDS = {"fp32": (1e-6, 3e-6, 3e-5), "fp64": (1e-12, 1e-10, 1e-10)}


def parameters(step_dir):
    """{name: flat list} of the parameters in a checkpoint that one process wrote: a safetensors file."""
    (shard,) = step_dir.glob("shard-*.safetensors")
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:start]).items():
        if name.startswith("param/"):
            first, end = entry["data_offsets"]
            kind = {"F32": "f", "F64": "d"}[entry["dtype"]]
            found[name[len("param/"):]] = array.array(kind, data[start + first:start + end]).tolist()
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_each_step_and_the_final_weights_are_those_of_pytorch(name, precision, tmp_path):
    fixture = json.loads((HERE / "fixtures" / f"{name}.json").read_text())
    write_tokens(tmp_path / "corpus", *corpus())
    settings = {**CASES[name], "data.train": "corpus", "train.precision": precision, "train.threads": 1,
                "checkpoint.every": 0, "checkpoint.dir": "checkpoints", "log.dir": "log"}
    run(["train", write_config(tmp_path / "run.ini", settings)], tmp_path, check=0)
    first, each, norm = BOUNDS[precision]
    rows = metrics(tmp_path / "log")
    assert sorted(rows) == list(range(1, len(fixture["losses"]) + 1))
    for step, (loss, grad_norm) in enumerate(zip(fixture["losses"], fixture["grad_norms"]), 1):
        found = rows[step]
        assert abs(found["loss"] / loss - 1) <= (first if step == 1 else each), (step, found["loss"], loss)
        assert abs(found["grad_norm"] / grad_norm - 1) <= norm, (step, found["grad_norm"], grad_norm)
    weights = parameters(tmp_path / f"checkpoints/step-{len(rows):08d}")
    failures = weight_failures(fixture, weights, precision)
    assert not failures, "\n".join(failures)
