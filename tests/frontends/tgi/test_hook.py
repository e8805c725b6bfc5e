"""The start-up hook on a tree with TGI's names: in place, or no process at all."""

from __future__ import annotations

from pathlib import Path

import fake_tgi
import pytest
from fake_tgi import SHOW, run_python

EX_CONFIG = 78


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return fake_tgi.make_tree(tmp_path / "tgi").parent


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    return fake_tgi.make_patches(tmp_path)


def start(code: str = SHOW) -> str:
    return f"import bicl_tgi_start\n{code}"


def test_our_modules_and_page_size_are_there_before_anyone_takes_them_over(
    tree: Path, patches: Path
) -> None:
    done = run_python(start(), tree, patches / "hook", BICL_BLOCK_SIZE="32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "32 <class 'bicl.frontends.tgi.kv_cache.KVCache'> True True\n"


def test_default_page_size_is_64(tree: Path, patches: Path) -> None:
    done = run_python(start(), tree, patches / "hook")
    assert done.stdout.startswith("64 ")


@pytest.mark.parametrize(("adapters", "graphs"), [("", "[2, 1]"), ("poet=/models/poet", "None")])
def test_graphs_which_leave_adapters_out_are_off_with_them(
    tree: Path, patches: Path, adapters: str, graphs: str
) -> None:
    code = "from text_generation_server.models.flash_causal_lm import CUDA_GRAPHS as graphs\n"
    done = run_python(start(code + "print(graphs)"), tree, patches / "hook", LORA_ADAPTERS=adapters)
    assert done.stdout == f"{graphs}\n", done.stderr


def test_disable_leaves_stock_tgi(tree: Path, patches: Path) -> None:
    done = run_python(start(), tree, patches / "hook", BICL_DISABLE="1", ATTENTION="paged")
    assert done.stdout == "256 stock True stock\n"


def test_a_switch_that_says_neither_yes_nor_no_ends_the_process(tree: Path, patches: Path) -> None:
    done = run_python(start(), tree, patches / "hook", BICL_DISABLE="yes")
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert "BICL_DISABLE is 'yes'; use 1 or 0" in done.stderr


def test_other_programs_are_left_alone(patches: Path) -> None:
    code = "import sys, json\nprint([m for m in sys.modules if m.split('.')[0] == 'bicl'])"
    assert run_python(start(code), patches / "hook").stdout == "[]\n"


def test_unknown_file_ends_the_process_and_is_named(tree: Path, patches: Path) -> None:
    file = tree / "text_generation_server" / "models" / "model.py"
    file.write_text(file.read_text() + "# edited\n")
    done = run_python(start(), tree, patches / "hook")
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert f"{file} is of no release" in done.stderr
    assert "BICL_DISABLE=1" in done.stderr


def test_failing_overlay_ends_the_process_although_tgi_would_swallow_it(
    tree: Path, patches: Path
) -> None:
    (patches / "overlay" / "kv_cache.py").write_text("import a_package_that_is_not_there\n")
    done = run_python(start(), tree, patches / "hook")
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert "kv_cache could not be replaced: ModuleNotFoundError" in done.stderr


def test_missing_overlay_file_ends_the_process(tree: Path, patches: Path) -> None:
    (patches / "overlay" / "cuda.py").unlink()
    done = run_python(start(), tree, patches / "hook")
    assert done.returncode == EX_CONFIG
    assert "cuda.py is missing" in done.stderr


def test_other_attention_ends_the_process(tree: Path, patches: Path) -> None:
    done = run_python(start(), tree, patches / "hook", ATTENTION="flashinfer")
    assert done.returncode == EX_CONFIG
    assert "ATTENTION is 'flashinfer'; BICL needs ATTENTION=flashdecoding" in done.stderr


@pytest.mark.parametrize("size", ["16", "48", "100", "128", "256"])
def test_page_size_without_kernel_ends_the_process(tree: Path, patches: Path, size: str) -> None:
    """(A47)"""
    done = run_python(start(), tree, patches / "hook", BICL_BLOCK_SIZE=size)
    assert done.returncode == EX_CONFIG
    assert f"BICL_BLOCK_SIZE is '{size}'; use one of 32, 64, auto" in done.stderr


def test_models_that_tgi_could_not_import_end_the_process(tree: Path, patches: Path) -> None:
    """TGI would go on with slow models and no paged cache."""
    missing = "import sys; sys.modules['text_generation_server.models.model'] = None\n"
    done = run_python(start(missing + SHOW), tree, patches / "hook")
    assert done.returncode == EX_CONFIG
    assert "could not import its flash models" in done.stderr


def test_old_releases_tell_tgi_that_windows_do_not_work(tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    patches = fake_tgi.make_patches(old, limit="sliding windows")
    assert run_python(start(), tree, patches / "hook").stdout.endswith("True False\n")


def test_missing_package_of_ours_ends_the_process(tree: Path, patches: Path) -> None:
    code = "import sys; sys.modules['bicl'] = None\n" + start()
    done = run_python(code, tree, patches / "hook")
    assert done.returncode == EX_CONFIG
    assert "the KV cache could not be put into text-generation-inference" in done.stderr
