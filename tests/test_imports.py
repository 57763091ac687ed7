"""Imports run one way, latent -> models -> {train, decode, eval, analysis} -> {paper, rl} -> cli: read as source."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "unspoken"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of the others. `data` knows no model; what trains knows both.
BELOW = {
    "config": set(),
    "errors": set(),
    "latent": {"config", "errors"},
    "data": {"config", "errors"},
    "models": {"config", "errors", "latent", "data"},
}
USES = {"config", "errors", "latent", "data", "models"}
ABOVE = {name: USES | {"train", "decode", "eval", "analysis"} for name in ("train", "decode", "eval", "analysis")}
ALLOWED = {
    **BELOW,
    **ABOVE,
    "serve": {"config", "errors"},
    "paper": set(BELOW) | set(ABOVE),
    "rl": set(BELOW) | set(ABOVE),
    "cli": set(BELOW) | set(ABOVE) | {"serve", "paper", "rl"},
    "launch": set(BELOW) | set(ABOVE) | {"cli"},  # reads the command that every process will run
    "__init__": set(),
}

# A configuration must be readable where the rest cannot be installed, in a serving environment.
LIGHT = {"config.py": {"transformers"}, "errors.py": set(), "__init__.py": {"wrapt"}, "cli.py": set()}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("unspoken.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = part(path)
    assert own in ALLOWED, f"a new part of the package: say in this test what {own} may import"
    assert parts_imported(path) - {own} <= ALLOWED[own]


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_no_library_when_imported(name):
    import sys

    tree = ast.parse((PACKAGE / name).read_text())
    libraries = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            libraries |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            libraries.add(node.module.split(".")[0])
    assert libraries - set(sys.stdlib_module_names) - {"unspoken"} <= LIGHT[name]


def test_there_is_no_cycle_between_parts():
    edges = {name: set() for name in ALLOWED}
    for path in MODULES:
        edges[part(path)] |= parts_imported(path) - {part(path)}
    done: list[str] = []
    while len(done) < len(edges):
        free = [name for name in edges if name not in done and edges[name] <= set(done)]
        assert free, f"a cycle among {sorted(set(edges) - set(done))}"
        done += free


def test_no_code_is_run_from_a_checkpoint():
    """No pickles, no remote code: weights come as safetensors or with `weights_only`."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert function not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), path
            assert options.get("trust_remote_code", "False") == "False", path
            assert options.get("allow_pickle", "False") == "False", path
            assert function != "torch.load" or options.get("weights_only") == "True", path
