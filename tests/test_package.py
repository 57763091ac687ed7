"""Fresh processes: what an import costs, what it registers, and in which order modules may come."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import tiny_model

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("latent", "models")
    for path in (ROOT / "unspoken" / package).glob("*.py")
)


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_is_light():
    code = (
        "import sys, time; start = time.process_time(); import unspoken; spent = time.process_time() - start\n"
        "print(spent, [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], *dir(unspoken))"
    )
    out = run(code)
    assert float(out.split()[0]) < 0.5
    assert "[]" in out
    assert "RecyclerForCausalLM" in out


LOADING = """
import sys
folder = sys.argv[1]
{imports}
config = AutoConfig.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
print(type(config).__name__, type(model).__name__, type(AutoModel.from_pretrained(folder)).__name__)
"""
AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"


@pytest.mark.parametrize("imports", [f"import unspoken\n{AUTO}", f"{AUTO}\nimport unspoken"], ids=["before", "after"])
def test_auto_classes_know_the_models_after_one_import(imports, tmp_path):
    """B90, and whichever of the two is imported first."""
    tiny_model("llama").float().save_pretrained(tmp_path)
    out = run(LOADING.format(imports=imports), str(tmp_path))
    assert out.split() == ["RecyclerConfig", "RecyclerForCausalLM", "RecyclerModel"]


def test_without_the_import_transformers_says_so(tmp_path):
    """B90: an unknown type must be an error that names it, not a wrong model."""
    tiny_model("llama").float().save_pretrained(tmp_path)
    code = "import sys; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "unspoken_recycler" in done.stderr


@pytest.mark.parametrize("first", ["from unspoken import RecyclerConfig", "import unspoken.models.loss"])
def test_any_name_of_the_package_may_come_first(first):
    """`from unspoken import RecyclerConfig` in a fresh process entered a half-imported module and died."""
    run(first)


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_any_module_may_come_first(module):
    run(f"import {module}")


def test_an_unknown_name_is_an_attribute_error():
    import unspoken

    with pytest.raises(AttributeError, match="no attribute 'Recycler'"):
        _ = unspoken.Recycler
    assert all(hasattr(unspoken, name) for name in unspoken.__all__)
