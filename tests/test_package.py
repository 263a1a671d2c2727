"""The package as users get it: light to import, complete in a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "matplotlib", "scipy", "transformers", "datasets", "pandas", "pyarrow", "evaluate", "peft")


def python(code: str, cwd: Path = ROOT) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["recipe", "ls"]])
def test_the_command_line_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['kvprofile', *{arguments}]\n"
        "from kvprofile.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])"
    )
    assert python(code).splitlines()[-1] == "heavy: []"


def test_the_folder_datasets_does_not_shadow_the_library() -> None:
    # As an installed console script sees it: without the working directory in front.
    code = "import importlib.util as u; print(u.find_spec('datasets').origin)"
    origin = subprocess.run([sys.executable, "-I", "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert Path(origin.stdout.strip()).name == "__init__.py"
    assert ROOT / "datasets" not in Path(origin.stdout.strip()).parents
    # With it in front, a regular package still wins over a folder without __init__.py.
    assert python(code) == origin.stdout


def test_the_folder_datasets_holds_no_python() -> None:
    assert not list((ROOT / "datasets").rglob("*.py"))


@pytest.mark.slow
def test_a_wheel_carries_recipes_and_data(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    bundled = {"recipes/demo.yaml", "datasets/hotpotqa_profile.jsonl", "datasets/hotpotqa.LICENCE.txt"}
    assert bundled <= {name.removeprefix("kvprofile/_bundled/") for name in names}
    assert "kvprofile/runtime/profile.schema.json" in names
    assert {name.split("/")[0] for name in names} <= {"kvprofile", wheel.name.split("-py3")[0] + ".dist-info"}
    assert not [name for name in names if "__pycache__" in name or (name.endswith(".py") and "_bundled" in name)]
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\nimport kvprofile.recipe as r; print(r.__file__)\n"
    )
    code += "print(r.load_recipe('recipes/demo.yaml').receiver)"
    file, receiver = python(code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path / "site")
    assert receiver == "demo-base+demo/receiver"


@pytest.mark.slow
def test_an_editable_install_maps_the_package_and_nothing_else(tmp_path: Path) -> None:
    python(f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # A folder kvprofile/ would hide the package, and the repository on sys.path would expose the folder datasets/.
        assert not [name for name in archive.namelist() if name.startswith(("kvprofile/", "datasets/"))]
        pth = archive.read(next(name for name in archive.namelist() if name.endswith(".pth")))
    assert str(ROOT).encode() not in pth
