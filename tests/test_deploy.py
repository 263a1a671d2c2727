"""The files that run kvprofile on schedule: their own tools accept them, their commands are real, exit codes do what is said."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_jsonschema.builtin_schemas as schemas
import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvprofile.recipe import parse_recipe
from tests.documented import parse

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "systemd" / "kvprofile-reprofile.service"
TIMER = DEPLOY / "systemd" / "kvprofile-reprofile.timer"
KUBERNETES = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "cronjob.yaml").read_text("utf-8")) if one]
WORKFLOW_TEXT = (DEPLOY / "github" / "reprofile.yml").read_text("utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(WORKFLOW_TEXT)
JOB = next(one for one in KUBERNETES if one["kind"] == "CronJob")["spec"]["jobTemplate"]["spec"]
POD = JOB["template"]["spec"]
RESUMABLE = 3
FINAL = {1, 2, 4}


def settings(unit: Path) -> dict[str, list[str]]:
    """Returns the values of every key of a unit."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text("utf-8").splitlines():
        if match := re.fullmatch(r"([A-Za-z]+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def of_systemd() -> list[str]:
    held = settings(SERVICE)
    variables = dict(word.split("=", 1) for line in held["Environment"] for word in shlex.split(line))
    (command,) = held["ExecStart"]
    words = [variables[word[1:]].split() if word.startswith("$") else [word] for word in command.split()]
    program, *rest = [word for part in words for word in part]
    return [Path(program).name, *rest]


def of_kubernetes() -> list[str]:
    (container,) = POD["containers"]
    return [*container["command"], *container["args"]]


def cron_line() -> str:
    (line,) = [one for one in (DEPLOY / "crontab").read_text("utf-8").splitlines() if one and not one.startswith("#")]
    assert "%" not in line, "cron ends the command there"
    match = re.fullmatch(r"[\d*/,-]+ [\d*/,-]+ [\d*/,-]+ [\d*/,-]+ [\d*/,-]+ (.+)", line)
    assert match
    return match[1]


def workflow_script() -> str:
    (script,) = [step["run"] for step in WORKFLOW["jobs"]["reprofile"]["steps"] if step.get("name") == "reprofile"]
    assert "${{" not in script
    return str(script)


def in_shell(script: str) -> list[str]:
    """Returns the words of the kvprofile command of a script, up to where its output goes."""
    (found,) = re.findall(r"\bkvprofile (reprofile .*?) \d?>>", script.replace("\\\n", " "))
    return ["kvprofile", *shlex.split(found)]


COMMANDS: dict[str, Callable[[], list[str]]] = {
    "systemd": of_systemd,
    "kubernetes": of_kubernetes,
    "cron": lambda: in_shell(cron_line()),
    "github": lambda: in_shell(workflow_script()),
}


@pytest.mark.parametrize("where", COMMANDS)
def test_the_command_is_one_of_kvprofile(where: str) -> None:
    program, *words = COMMANDS[where]()
    assert (program, words[0]) == ("kvprofile", "reprofile")
    assert "--json" in words
    context = parse(words)
    assert context.params["recipes"]
    assert context.params["as_json"] is True


class TestSystemd:
    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
    def test_systemd_accepts_the_units(self, tmp_path: Path) -> None:
        # The program need not be installed here; systemd would complain of that alone.
        text = SERVICE.read_text("utf-8").replace("/opt/kvprofile/bin/kvprofile", "/bin/true")
        (tmp_path / SERVICE.name).write_text(text, "utf-8")
        shutil.copy(TIMER, tmp_path)
        units = [str(tmp_path / unit.name) for unit in (SERVICE, TIMER)]
        ended = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_only_what_is_resumable_is_started_again(self) -> None:
        held = settings(SERVICE)
        assert held["Type"] == ["oneshot"]
        assert held["Restart"] == ["on-failure"]
        assert {int(code) for code in held["RestartPreventExitStatus"][0].split()} == FINAL

    def test_what_it_writes_lies_in_folders_that_systemd_makes(self) -> None:
        held = settings(SERVICE)
        (program, *words) = of_systemd()
        assert program == "kvprofile"
        assert words[words.index("--out") + 1] == f"/var/lib/{held['StateDirectory'][0]}"
        assert f"KVPROFILE_CACHE=/var/cache/{held['CacheDirectory'][0]}" in held["Environment"][-1].split()
        assert words[1].startswith(f"/etc/{held['ConfigurationDirectory'][0]}/")


class TestKubernetes:
    @pytest.mark.parametrize("document", KUBERNETES, ids=lambda one: str(one["kind"]))
    def test_kubernetes_knows_every_field(self, document: dict[str, Any]) -> None:
        kubernetes_validate.validate(document, "1.31", strict=True)

    def test_only_what_is_resumable_is_retried(self) -> None:
        assert POD["restartPolicy"] == "Never", "podFailurePolicy needs it"
        (rule,) = [one for one in JOB["podFailurePolicy"]["rules"] if "onExitCodes" in one]
        assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
        assert set(rule["onExitCodes"]["values"]) == {*FINAL, 137, 139}
        assert rule["onExitCodes"]["containerName"] == POD["containers"][0]["name"]
        assert JOB["backoffLimit"] > 0

    def test_one_at_a_time(self) -> None:
        (job,) = [one for one in KUBERNETES if one["kind"] == "CronJob"]
        assert job["spec"]["concurrencyPolicy"] == "Forbid"

    def test_every_volume_is_there_and_used(self) -> None:
        (container,) = POD["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in POD["volumes"]}
        assert mounts.keys() == volumes.keys()
        there = {(one["kind"], one["metadata"]["name"]) for one in KUBERNETES}
        assert ("PersistentVolumeClaim", volumes["store"]["persistentVolumeClaim"]["claimName"]) in there
        assert ("PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"]) in there
        assert ("ConfigMap", volumes["recipes"]["configMap"]["name"]) in there
        words = of_kubernetes()
        assert words[words.index("--out") + 1] == mounts["store"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        for name in ("KVPROFILE_CACHE", "HF_HOME"):
            assert environment[name].startswith(f"{mounts['cache']}/")
        assert environment["HOME"] == mounts["tmp"], "the root file system is read-only"

    def test_the_recipe_is_one(self, tmp_path: Path) -> None:
        (held,) = [one["data"] for one in KUBERNETES if one["kind"] == "ConfigMap"]
        (container,) = POD["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert f"{mounts['recipes']}/{next(iter(held))}" in of_kubernetes()
        for text in held.values():
            assert parse_recipe(yaml.safe_load(text), tmp_path).sender != ""

    def test_nothing_runs_as_root(self) -> None:
        (container,) = POD["containers"]
        assert POD["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


class TestGithub:
    def test_github_knows_every_key(self) -> None:
        schema = schemas.get_builtin_schema("vendor.github-workflows")
        # YAML 1.1 reads the key `on` as true; GitHub does not.
        jsonschema.validate({"on" if key is True else key: value for key, value in WORKFLOW.items()}, schema)

    def test_one_at_a_time_and_no_rights(self) -> None:
        assert WORKFLOW["concurrency"]["cancel-in-progress"] is False
        assert WORKFLOW["permissions"] == {"contents": "read"}

    def test_actions_are_githubs_own_at_a_major_version(self) -> None:
        used = re.findall(r"uses: (\S+)", WORKFLOW_TEXT)
        assert len(used) == 7
        assert all(re.fullmatch(r"actions/[a-z-]+(/[a-z]+)?@v\d+", one) for one in used)

    def test_what_is_kept_is_what_is_restored(self) -> None:
        steps = WORKFLOW["jobs"]["reprofile"]["steps"]
        restored, saved = ([s for s in steps if f"cache/{what}" in s.get("uses", "")] for what in ("restore", "save"))
        assert restored[0]["with"]["path"] == saved[0]["with"]["path"]
        assert restored[0]["with"]["key"] == saved[0]["with"]["key"]
        assert saved[0]["with"]["key"].startswith(restored[0]["with"]["restore-keys"])
        assert saved[0]["if"] == "always()", "also after a run that failed or was cut off"
        words = in_shell(workflow_script())
        assert words[words.index("--out") + 1] == saved[0]["with"]["path"]


def fake(folder: Path, code: int) -> dict[str, str]:
    """Puts a kvprofile that ends with `code` into a folder, and returns an environment that finds it."""
    folder.mkdir(parents=True)
    program = folder / "kvprofile"
    program.write_text(f'#!/bin/sh\necho "{{}}"\necho remark >&2\nexit {code}\n', "utf-8")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RUNNER_TEMP": str(folder)}


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash and coreutils")
@pytest.mark.parametrize("code", range(5))
def test_the_workflow_fails_unless_it_is_done_or_goes_on(code: int, tmp_path: Path) -> None:
    environment = fake(tmp_path / "bin", code)
    shell = ["bash", "-e", "-o", "pipefail", "-c", workflow_script()]
    ended = subprocess.run(shell, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if code == RESUMABLE else code)
    assert ended.stdout.startswith("{}\n")
    assert ("::notice::" in ended.stdout) is (code == RESUMABLE)


@pytest.mark.skipif(shutil.which("sh") is None or shutil.which("nice") is None, reason="needs a POSIX shell")
@pytest.mark.parametrize("code", range(5))
def test_cron_writes_a_mail_only_if_something_is_wrong(code: int, tmp_path: Path) -> None:
    environment = {**fake(tmp_path / "kvprofile" / ".venv" / "bin", code), "HOME": str(tmp_path)}
    ended = subprocess.run(["sh", "-c", cron_line()], env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.stdout.startswith(f"kvprofile reprofile ended with {code}, see ") if code else ended.stdout == ""
    assert (tmp_path / "kvprofile" / "reprofile.jsonl").read_text("utf-8") == "{}\n"
    assert (tmp_path / "kvprofile" / "reprofile.log").read_text("utf-8") == "remark\n"


def test_the_page_names_every_file() -> None:
    page = (DEPLOY / "README.md").read_text("utf-8")
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in page
    assert [int(code) for code in re.findall(r"^\| (\d) \|", page, flags=re.MULTILINE)] == list(range(5))
