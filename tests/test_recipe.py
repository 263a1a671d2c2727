from pathlib import Path

import pytest

from kvprofile.cli.options import recipe_with
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.recipe import Recipe, bundled_recipes, load_recipe, parse_recipe, to_yaml, with_options

MINIMAL = "sender: a/b\nreceiver: a/c\ndata: [{dataset: hotpotqa_profile, task: qa}]\n"


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def minimal(**changes: object) -> Recipe:
    data = [{"dataset": "hotpotqa_profile", "task": "qa"}]
    return parse_recipe({"sender": "a/b", "receiver": "a/c", "data": data, **changes}, Path("/r"))


def test_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.contexts, recipe.granularity, recipe.confidence, recipe.resamples) == (50, (1, 2, 3), 0.95, 10_000)
    assert recipe.folder == tmp_path.resolve()
    assert recipe.search_folders[:2] == (tmp_path.resolve(), Path.cwd())
    assert recipe.data[0].metrics is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "granularty: [1]", r'my\.yaml: unknown key "granularty" \(did you mean "granularity"\?\)'),
        (MINIMAL + "models: {dtyp: float32}", r'unknown key "dtyp" \(did you mean "dtype"\?\)'),
        (MINIMAL + "folder: /x", 'unknown key "folder"'),
        (MINIMAL + "_folder: /x", 'unknown key "_folder"'),
        (MINIMAL + "granularity: [0]", r"granularity\[0\] should be greater than or equal to 1, not 0"),
        (MINIMAL + "granularity: []", "granularity"),
        (MINIMAL + "resamples: 1000001", "resamples should be less than or equal to 1000000"),
        (MINIMAL + "models: {quantization: &a {load_in_4bit: true, x: *a}}", "uses aliases"),
        (MINIMAL + "models: {quantization: {bits: 4, x: !!binary gIGC}}", "not JSON serializable"),
        (MINIMAL + "contexts: 0", "contexts should be greater than or equal to 1"),
        (MINIMAL + "contexts: 1.5", "contexts should be a valid integer"),
        (MINIMAL + "confidence: 1", "confidence should be less than 1"),
        (MINIMAL + "models: {dtype: int8}", "models.dtype should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("sender: a/b\ndata: []", r"receiver is missing \(and 1 more\)"),
        ("sender: a/b\nreceiver: a/c\ndata: {dataset: x, task: qa}", "data should be a valid list"),
        (MINIMAL.replace("task: qa", "task: qa, split: train"), r'data\[0\] has split .* "hub:hotpotqa_profile"'),
        (MINIMAL.replace("task: qa", "task: qa, prompt: {after: ' '}"), r"data\[0\]\.prompt\.after may not be blank"),
        (MINIMAL.replace("}]", "}, {dataset: hotpotqa_profile, task: qa}]"), 'holds "hotpotqa_profile" .* twice'),
        ("sender: [", r"my\.yaml is not valid YAML at line 1"),
        ("", "holds no keys"),
        ("- a", "holds no keys"),
    ],
)
def test_bad_recipes_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not valid YAML"):
        load_recipe(write(tmp_path, "sender: !!python/object/apply:os.getcwd []"))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not UTF-8"):
        load_recipe(str(tmp_path / "my.yaml"))


@pytest.mark.parametrize("name", ["demo", "recipes/demo.yaml", "demo.yaml"])
def test_bundled_recipes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(name)
    assert recipe.receiver == "demo-base+demo/receiver"
    assert recipe.folder == bundled_recipes()["demo"].parent


def test_an_unknown_name_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r'dmo is neither a file nor a bundled recipe \(did you mean "demo"\?\)'):
        load_recipe("dmo")
    with pytest.raises(BadInput, match="is a folder"):
        load_recipe(str(tmp_path))


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_yaml_round_trip_keeps_the_hash(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(name)
    again = load_recipe(write(tmp_path, to_yaml(recipe)))
    assert again.sha256() == recipe.sha256()
    assert again.model_dump() == recipe.model_dump()


def test_the_hash_is_of_the_declared_fields_alone() -> None:
    recipe = minimal()
    assert recipe.sha256() == parse_recipe(recipe.model_dump(), Path("/elsewhere")).sha256()
    assert recipe.sha256() == minimal(contexts=50).sha256()
    changes = ({"seed": 1}, {"sender": "a/x"}, {"models": {"dtype": "float32"}}, {"store_text": False})
    assert len({recipe.sha256(), *(minimal(**change).sha256() for change in changes)}) == 5


def test_a_recipe_without_stop_texts_has_the_hash_that_it_had_before_there_were_any() -> None:
    recipe = minimal()
    declared = recipe.model_dump(mode="json", exclude={"models": {"device", "device_map"}})
    assert [source.pop("stop") for source in declared["data"]] == [[]]
    assert recipe.sha256() == json_sha256(declared)
    stopped = with_options(recipe, data=[{**recipe.data[0].model_dump(), "stop": ["x"]}])
    assert stopped.sha256() != recipe.sha256()


@pytest.mark.parametrize("stop", ["\n", [""], [1], None, 5])
def test_stop_texts_are_a_list_of_texts(stop: object) -> None:
    with pytest.raises(
        BadInput, match=r"data\[0\]\.stop has to be a list of texts that are not empty, such as [^()]*$"
    ):
        minimal(data=[{"dataset": "qmsum", "task": "summarization", "stop": stop}])


def test_units_are_sorted_once() -> None:
    assert minimal(granularity=[3, 1, 3]).granularity == (1, 3)
    assert minimal(granularity=[3, 1, 3]).sha256() == minimal(granularity=[1, 3]).sha256()


def test_a_device_of_the_command_line_overrides_a_recipes_map(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "models: {device_map: auto, dtype: float32}\n")
    models = recipe_with(path, {"device": "cpu"}).models
    assert (models.device, models.device_map, models.dtype) == ("cpu", None, "float32")
    assert recipe_with(path, {"dtype": "bfloat16"}).models.device_map == "auto"


def test_options_are_checked_and_keep_the_folder() -> None:
    recipe = with_options(minimal(), contexts=6, granularity=(3,))
    assert (recipe.contexts, recipe.granularity, recipe.folder) == (6, (3,), Path("/r"))
    with pytest.raises(BadInput, match="options: contexts should be"):
        with_options(minimal(), contexts=0)


def test_data_sources_have_short_names() -> None:
    names = {"qmsum": "qmsum", "data/my.questions.jsonl": "my.questions", "hub:org/set": "org/set"}
    for dataset, name in names.items():
        assert minimal(data=[{"dataset": dataset, "task": "qa"}]).data[0].name == name
    source = {"dataset": "hub:org/set", "task": "qa", "subset": "en", "split": "test"}
    assert minimal(data=[source]).data[0].name == "org/set:en:test"


def test_a_prompt_that_never_asks_the_question_is_refused() -> None:
    source = {"dataset": "d.jsonl", "task": "qa", "prompt": {"after": " Answer:"}}
    values = {"sender": "a", "receiver": "b", "data": [source]}
    with pytest.raises(BadInput, match="the question would never be asked"):
        parse_recipe(values, Path())
    parse_recipe({**values, "data": [{**source, "fields": {"question": None}}]}, Path())
