"""Run folders as training, evaluation, verification and generation leave them, with invented numbers."""

import json
from pathlib import Path

import pytest
import yaml


def evaluation(folder: str, nats: dict[str, list[float]], num_passes: int = 1, num_documents: int = 2) -> dict:
    """What `unspoken eval` writes: `nats` are those of each piece of ten targets."""
    pieces = len(next(iter(nats.values())))
    losses = {name: sum(values) / (10 * pieces) for name, values in nats.items()}
    return {
        "results": {
            name: {"loss": loss, "bits_per_byte": loss / 3, "num_targets": 10 * pieces, "num_documents": num_documents}
            for name, loss in losses.items()
        },
        "depth_curve": {
            "losses": [5.0, 4.9, 4.91],
            "exact": 4.905,
            "num_train_passes": num_passes,
            "best_depth": 2,
            "drift": 0.01,
        },
        "data": {"fingerprint": "f", "split": "val"},
        "model": {"folder": folder, "config": {}},
        "rows": {
            "document": [i * num_documents // pieces for i in range(pieces)],
            "targets": [10] * pieces,
            "nats": nats,
        },
    }


def write_run(folder: Path, method: str = "recycler", **recipe) -> Path:
    num_passes = 2 if method == "recycler" else 1
    folder.mkdir(parents=True)
    model = {"method": method, **({"num_train_passes": 2} if num_passes == 2 else {}), **recipe}
    (folder / "resolved.yaml").write_text(yaml.safe_dump({"model": model}))
    summary = {
        "tokens": 3000, "pass_tokens": 3000 * num_passes, "train_flops": 9e9 * num_passes, "train_cpu_seconds": 4.5,
        "num_parameters": 1234, "flops_convention": "6 N D",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "kind": "eval", "tokens": step * 1000}
        | {f"loss_pass_{i}": 8.0 - step - 0.1 * i for i in range(1, num_passes + 2)}
        for step in range(4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["k=1", "k=2", "exact"] if num_passes == 2 else ["k=1"]
    nats = {name: [50.0 - i - piece % 3 for piece in range(12)] for i, name in enumerate(names)}
    (folder / "eval.json").write_text(json.dumps(evaluation(str(folder), nats, num_passes)))
    (folder / "generations.jsonl").write_text(
        json.dumps({"prompt": "<i>Once</i>", "completions": [{"text": " & <script>alert(1)</script>"}]}) + "\n"
    )
    checks = [
        {"name": "causality", "passed": True, "deviation": 1e-6, "tolerance": 2e-4, "note": ""},
        {"name": "batch = single", "passed": False, "deviation": None, "tolerance": 2e-4, "note": "ValueError: <b>"},
    ]
    (folder / "verify.json").write_text(json.dumps({"checks": checks, "dtype": "float32", "adapter_was_zero": True}))
    return folder


@pytest.fixture
def run_folder(tmp_path) -> Path:
    return write_run(tmp_path / "run")
