"""Tasks: LongBench's prompts, answer limits and metrics (arXiv 2308.14508), each split at the end of the context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """How a record becomes a prompt and how its answer is scored.

    Attributes:
        name: Value of the `task` column.
        before: User text ahead of the context; part of the shared context.
        after: User text behind the context, with `{question}`; part of the suffix.
        after_without_question: Used when a record has no question.
        max_new_tokens: Limit on the answer, in tokens.
        metrics: Default metrics; the first one is the task's main metric.
    """

    name: str
    before: str
    after: str
    after_without_question: str
    max_new_tokens: int
    metrics: tuple[str, ...]

    def parts(self, context: str, question: str) -> tuple[str, str]:
        """Returns the user message in two parts: up to the end of the context, and what follows it."""
        after = self.after.replace("{question}", question) if question else self.after_without_question
        return self.before + context, after


_QA_INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="qa",
            before=f"{_QA_INSTRUCTION}\n\nThe following are given passages.\n",
            after=f"\n\n{_QA_INSTRUCTION}\n\nQuestion: {{question}}\nAnswer:",
            after_without_question=f"\n\n{_QA_INSTRUCTION}\n\nAnswer:",
            max_new_tokens=32,
            metrics=("f1", "exact_match"),
        ),
        Task(
            name="summarization",
            before=(
                "You are given a meeting transcript and a query containing a question or instruction. "
                "Answer the query in one or more sentences.\n\nTranscript:\n"
            ),
            after=(
                "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
                "Query: {question}\nAnswer:"
            ),
            after_without_question="\n\nNow, write a one-page summary of the above.\n\nSummary:",
            max_new_tokens=512,
            metrics=("rouge_l",),
        ),
        Task(
            name="code",
            before="Please complete the code given below. \n",
            after="{question}Next line of code:\n",
            after_without_question="Next line of code:\n",
            max_new_tokens=64,
            metrics=("code_similarity",),
        ),
    )
}
