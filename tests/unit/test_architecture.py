"""Arrows point down only: adapters -> engine -> capture, storage, restore -> image, sharding -> errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "common" / "ckpt_engine"
ADAPTERS = [ROOT / name for name in ("lightning_ckpt", "accelerate_ckpt") if (ROOT / name).is_dir()]
FRAMEWORKS = {"lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers", "deepspeed"}

# What a package may import from the engine, beside itself. Modules at the top of the package are the engine proper and
# may import everything below them; these three are at the bottom and may be imported by everything.
BOTTOM = {"errors", "config", "version"}
ALLOWED = {
    "image": {"sharding"},
    "sharding": {"image"},
    "storage": {"image", "sharding"},
    "restore": {"image", "sharding", "storage"},
    "observe": {"image"},
    "capture": {"image", "sharding", "observe"},
}
MAX_LINES, MAX_FUNCTION_LINES = 500, 80


def modules(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names that a module imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: name the package"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of the engine that a dotted name lies in; None outside the engine."""
    pieces = name.split(".")
    return pieces[1] if pieces[0] == "ckpt_engine" and len(pieces) > 1 else None


def upward(path: Path) -> list[str]:
    """Imports of an engine module that point up or sideways."""
    package = path.relative_to(ENGINE).parts[0]
    if package.removesuffix(".py") in BOTTOM:
        allowed: set[str] = BOTTOM
    elif package in ALLOWED:
        allowed = ALLOWED[package] | BOTTOM | {package}
    else:
        return []
    return [name for name in imports(path) if (part := part_of(name)) is not None and part not in allowed]


def test_every_package_of_the_engine_has_a_place_in_the_order() -> None:
    packages = {path.name for path in ENGINE.iterdir() if (path / "__init__.py").exists()}
    assert packages - ALLOWED.keys() <= {"interop", "cli"}, "give the new package a line in ALLOWED"


@pytest.mark.parametrize("path", modules(ENGINE), ids=lambda path: str(path.relative_to(ENGINE)))
def test_engine_modules_import_downwards_only(path: Path) -> None:
    assert upward(path) == []


def test_the_engine_imports_no_framework() -> None:
    found = {name.split(".")[0] for path in modules(ENGINE) for name in imports(path)}
    assert not found & (FRAMEWORKS | {root.name for root in ADAPTERS})
    assert "torch" in found


def test_an_adapter_imports_only_its_own_framework_and_no_other_adapter() -> None:
    for root in ADAPTERS:
        found = {name.split(".")[0] for path in modules(root) for name in imports(path)}
        assert not found & ({other.name for other in ADAPTERS} - {root.name})
        assert not found & (FRAMEWORKS - {root.name.removesuffix("_ckpt")})


def test_no_import_at_module_level_runs_in_a_circle() -> None:
    graph = {
        module_name(path): {name for name in module_level(path) if name.startswith("ckpt_engine")}
        for path in modules(ENGINE)
    }
    edges = {module: {known for name in names if (known := resolve(name, graph))} for module, names in graph.items()}
    assert circle(edges) == []


def module_name(path: Path) -> str:
    return ".".join(("ckpt_engine", *path.relative_to(ENGINE).with_suffix("").parts)).removesuffix(".__init__")


def module_level(path: Path) -> Iterator[str]:
    """Imports that run when the module is imported: not those in functions or under TYPE_CHECKING."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def resolve(name: str, graph: dict[str, set[str]]) -> str | None:
    """The module that a dotted name is, or lies in."""
    return name if name in graph else (name.rpartition(".")[0] if name.rpartition(".")[0] in graph else None)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph, or nothing: modules that import no remaining one are taken away until none is left."""
    left = dict(edges)
    while free := [module for module, needs in left.items() if not (needs & left.keys()) - {module}]:
        for module in free:
            del left[module]
    return sorted(left)


def test_the_search_for_circles_finds_one() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_an_upward_import_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ENGINE", tmp_path)
    (tmp_path / "image").mkdir()
    module = tmp_path / "image" / "layout.py"
    module.write_text("def f():\n    from ckpt_engine.engine import Engine\n    return Engine\n")
    assert upward(module) == ["ckpt_engine.engine.Engine"]


@pytest.mark.parametrize("path", modules(ENGINE, *ADAPTERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long: split it"
