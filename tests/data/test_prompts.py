import hashlib
from typing import Any

import numpy as np
import pytest

from kvprofile.data.prompts import Sample, build_sample, task_of
from kvprofile.data.records import Record
from kvprofile.data.tasks import TASKS, Task
from kvprofile.errors import BadInput
from kvprofile.recipe import DataSource
from tests.tiny import TEMPLATE, tiny_tokenizer

RECORD = Record("r1", "The cat sat on the mat.\n\nThe dog sat on the log.", "Who sat on the mat?", ("the cat",))
PREFIX = "<|im_start|>user\n"


def build(
    record: Record = RECORD, tokenizer: Any = None, task: str = "qa", limit: int | None = None, chat: bool = True
) -> Sample:
    return build_sample(
        tokenizer or tiny_tokenizer(),
        record,
        TASKS[task],
        dataset="d",
        max_new_tokens=8,
        stop=(),
        max_context_tokens=limit,
        chat_template=chat,
    )


def test_the_parts_are_the_prompt_cut_at_the_end_of_the_context() -> None:
    tokenizer, sample = tiny_tokenizer(), build()
    before, after = TASKS["qa"].parts(RECORD.context, RECORD.question)
    assert tokenizer.decode(sample.context_token_ids) == PREFIX + before
    assert tokenizer.decode(sample.suffix_token_ids) == f"{after}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.context_token_ids[: sample.head_tokens]) == PREFIX + TASKS["qa"].before
    assert (sample.sample_id, sample.task, sample.dataset, sample.references) == ("r1", "qa", "d", ("the cat",))
    assert (sample.truncated_tokens, sample.max_new_tokens, sample.boundary_moved) == (0, 8, False)


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("question", ["", "Who?"])
def test_every_task_is_cut_exactly(task: str, question: str) -> None:
    record = Record("r", "x = 1\n", question, ("y",))
    sample, tokenizer = build(record, task=task), tiny_tokenizer()
    assert tokenizer.decode(sample.context_token_ids).endswith("x = 1\n")
    assert tokenizer.decode(sample.suffix_token_ids).startswith(TASKS[task].parts("", question)[1])


def test_the_context_does_not_depend_on_the_question() -> None:
    other = Record("r2", RECORD.context, "And who on the log?", ("the dog",))
    assert build().context_token_ids == build(other).context_token_ids


def test_a_context_that_quotes_the_prompt_is_cut_at_its_end() -> None:
    quoted = TASKS["qa"].parts("", RECORD.question)[1]
    sample = build(Record("r", f"Log:{quoted} the cat", RECORD.question, ("x",)))
    assert tiny_tokenizer().decode(sample.context_token_ids).endswith(f"Log:{quoted} the cat")


def test_templates_may_strip_the_message() -> None:
    strips = tiny_tokenizer(TEMPLATE.replace("message['content']", "message['content'] | trim"))
    sample = build(Record("r", "x = 1\n", "", ("y",)), strips, task="code")
    assert strips.decode(sample.context_token_ids).endswith("given below. \nx = 1\n")
    assert strips.decode(sample.suffix_token_ids) == "Next line of code:<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("change", ["upper", "replace('cat', 'dog')", "title"])
def test_templates_that_change_the_message_are_refused(change: str) -> None:
    template = TEMPLATE.replace("message['content']", f"message['content'] | {change}")
    if "(" in change:
        template = TEMPLATE.replace("message['content']", f"message['content'].{change}")
    with pytest.raises(BadInput, match=r'changes the message of record "r1".*chat_template: false'):
        build(tokenizer=tiny_tokenizer(template))


def test_templates_that_refuse_the_message() -> None:
    with pytest.raises(BadInput, match=r"refuses a lone user message \(system first\)"):
        build(tokenizer=tiny_tokenizer("{{ raise_exception('system first') }}"))


def test_without_a_template_the_message_is_plain() -> None:
    before, after = TASKS["qa"].parts(RECORD.context, RECORD.question)
    for sample in (build(chat=False), build(tokenizer=tiny_tokenizer(None))):
        tokenizer = tiny_tokenizer()
        assert tokenizer.decode(sample.context_token_ids) == before
        assert tokenizer.decode(sample.suffix_token_ids) == after
        assert tokenizer.decode(sample.context_token_ids[: sample.head_tokens]) == TASKS["qa"].before


class WithSpecials:
    """Puts BOS in front and EOS behind, as some tokenizers do with plain text."""

    chat_template = None
    bos_token_id, eos_token_id = 0, 1

    def __init__(self) -> None:
        self.inner = tiny_tokenizer(None)

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = self.inner(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [0, *ids, 1] if add_special_tokens else ids}


def test_plain_prompts_begin_with_bos_and_hold_no_other_special_token() -> None:
    sample, plain = build(tokenizer=WithSpecials()), build(chat=False)
    assert sample.context_token_ids == (0, *plain.context_token_ids)
    assert sample.suffix_token_ids == plain.suffix_token_ids
    assert sample.head_tokens == plain.head_tokens + 1


class SpaceInFront(WithSpecials):
    """Puts a space in front of every text, as SentencePiece does."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return super().__call__(f" {text}", add_special_tokens)


def test_a_suffix_gets_no_space_that_the_prompt_lacks() -> None:
    sample = build(tokenizer=SpaceInFront())
    assert tiny_tokenizer().decode(sample.suffix_token_ids) == TASKS["qa"].parts("", RECORD.question)[1]
    assert not sample.boundary_moved


def test_a_moved_boundary_is_counted() -> None:
    # Alone, neither part holds the word "the" that the joint text has across the boundary.
    task = Task("qa", "", "he end", "he end", 8, ("f1",))
    tokenizer = tiny_tokenizer(None)
    sample = build_sample(
        tokenizer,
        Record("r", "on t", "", ("x",)),
        task,
        dataset="d",
        max_new_tokens=8,
        stop=(),
        max_context_tokens=None,
        chat_template=True,
    )
    assert sample.boundary_moved
    assert list(sample.context_token_ids) == tokenizer("on t")["input_ids"]
    assert list(sample.suffix_token_ids) == tokenizer("he end")["input_ids"]


def test_long_contexts_are_cut_in_the_middle() -> None:
    record = Record("r", "The cat sat on the mat. " * 50, "Who?", ("x",))
    whole = build(record)
    limit = whole.head_tokens * 2 + 41
    sample = build(record, limit=limit)
    assert len(sample.context_token_ids) == limit
    assert sample.truncated_tokens == len(whole.context_token_ids) - limit
    half = (limit + 1) // 2
    assert sample.context_token_ids[:half] == whole.context_token_ids[:half]
    assert sample.context_token_ids[half:] == whole.context_token_ids[-(limit - half) :]
    assert sample.suffix_token_ids == whole.suffix_token_ids
    assert build(record, limit=len(whole.context_token_ids)).truncated_tokens == 0


def test_the_head_is_never_cut() -> None:
    record = Record("r", "The cat sat on the mat. " * 50, "Who?", ("x",))
    head = build(record).head_tokens
    sample = build(record, limit=head + 3)
    assert sample.context_token_ids[:head] == build(record).context_token_ids[:head]
    assert sample.context_token_ids[head:] == build(record).context_token_ids[-3:]
    with pytest.raises(BadInput, match="raise max_context_tokens"):
        build(record, limit=head)


def test_the_hash_is_of_little_endian_int32() -> None:
    sample = build(limit=200)
    assert sample.context_sha256 == hashlib.sha256(np.array(sample.context_token_ids, "<i4").tobytes()).hexdigest()


@pytest.mark.parametrize("context", ["", " \n\t"])
def test_empty_contexts_are_refused(context: str) -> None:
    with pytest.raises(BadInput, match='record "r9" of d has an empty context'):
        build(Record("r9", context, "Who?", ("x",)))


def test_a_source_overrides_its_task() -> None:
    plain = task_of(DataSource(dataset="qmsum", task="qa"))
    assert plain == TASKS["qa"]
    prompt = {"before": "B\n", "after": "\nQ: {question} A:"}
    task = task_of(DataSource(dataset="qmsum", task="qa", prompt=prompt, metrics=("f1",), max_new_tokens=5))
    assert (task.name, task.metrics, task.max_new_tokens) == ("qa", ("f1",), 5)
    assert task.parts("c", "who") == ("B\nc", "\nQ: who A:")
    assert task.parts("c", "") == ("B\nc", "\nQ:  A:")


def test_unknown_tasks_are_guessed() -> None:
    with pytest.raises(BadInput, match=r'unknown task "sumarization" \(did you mean "summarization"\?\); tasks are qa'):
        task_of(DataSource(dataset="qmsum", task="sumarization"))
