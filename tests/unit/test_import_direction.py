"""Dependencies point one way: frontends -> sparse -> attention -> ops; all may use the cache."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "server" / "bicl"
CSRC = PACKAGE.parents[1] / "csrc"

OPEN_TO_ALL = {"bicl", "bicl.errors", "bicl.config", "bicl.settings"}
ALLOWED = {
    "cache": {"cache"},
    "ops": {"ops", "cache"},
    "attention": {"attention", "ops", "cache"},
    "sparse": {"sparse", "attention", "ops", "cache"},
    "flash_attn_interface": {"attention", "ops", "cache"},
}
ENVIRONMENT_READS = {"os.environ", "os.getenv", "os.environb"}
FORBIDDEN_BELOW_FRONTENDS = {
    "transformers",
    "text_generation_server",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus_client",
}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``: a type's name is no dependency."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            modules.add(node.module)
    return modules


def files_of(part: str) -> list[Path]:
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_core_imports_only_what_lies_below_it(part: str) -> None:
    for path in files_of(part):
        for module in imported_modules(path):
            if not module.startswith("bicl") or module in OPEN_TO_ALL:
                continue
            assert module.split(".")[1] in ALLOWED[part], f"{path} imports {module}"


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_core_knows_no_frontend_library(part: str) -> None:
    for path in files_of(part):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & FORBIDDEN_BELOW_FRONTENDS, f"{path} imports {roots}"


def test_prometheus_has_one_importer() -> None:
    importers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if "stubs" not in path.parts  # stand-ins for foreign packages
        if any(m.split(".")[0] == "prometheus_client" for m in imported_modules(path))
    }
    assert importers == {"metrics"}


def test_environment_is_read_in_one_place() -> None:
    """The launcher shim and the TGI hook also read it: there the environment is the interface."""
    readers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT_READS:
                readers.add(path.relative_to(PACKAGE).as_posix())
    outside = {r for r in readers if not r.startswith(("launcher", "frontends/tgi"))}
    # cli.py only writes: settings of libraries that have no other switch. healthcheck.py is a
    # program of its own, started every few seconds: reading config.py would cost it all of torch.
    assert outside <= {"config.py", "cli.py", "healthcheck.py"}
    imported = imported_modules(PACKAGE / "healthcheck.py")
    assert not [module for module in imported if module.startswith("bicl")]


def test_kernels_include_nothing_of_torch_or_python() -> None:
    """One library serves every version of both; tensors come as tvm-ffi's views."""
    includes = {
        include
        for path in CSRC.rglob("*")
        if path.suffix in {".cpp", ".cu", ".cuh", ".h"}
        for include in re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text())
    }
    assert "cuda_runtime.h" in includes
    foreign = re.compile(r"(torch|ATen|c10|pybind11|dlpack)/|Python\.h|\.\./\.\./\.\./")
    assert [include for include in includes if foreign.search(include)] == []
