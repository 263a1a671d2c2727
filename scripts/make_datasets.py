"""Makes the bundled data sets from their source files; prints one line per set.

    python scripts/make_datasets.py --hotpotqa hotpotqa.jsonl --2wikimqa 2wikimqa.jsonl --musique musique.jsonl \
        --qmsum qmsum.jsonl --stdlib Lib --python 3.11.7

The JSONL sources hold one object a line with id, context, question, answers, source and licence. `Lib` is the standard
library's folder, as CPython's source tree or an installed Python has it. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FIELDS = ("id", "context", "question", "answers", "source", "licence")
OUT = Path(__file__).resolve().parent.parent / "datasets"
CODE_RECORDS = 60
TRAINED_ON = 150
"""Leading 2WikiMultihopQA records that the demo pair's receiver was trained on (`recipes/demo/train.py`)."""
OTHER_RECORDS = 50
PREFIX_CHARS = (2400, 4500)  # about 600 to 1500 tokens
ANSWER_CHARS = (12, 100)
# Tests, tables, and packages that later versions drop or some installations lack.
SKIPPED_PACKAGES = {
    "test",
    "tests",
    "distutils",
    "idlelib",
    "lib2to3",
    "site-packages",
    "turtledemo",
    "encodings",
    "__pycache__",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hotpotqa", type=Path, required=True)
    parser.add_argument("--2wikimqa", type=Path, required=True, dest="two_wiki")
    parser.add_argument("--musique", type=Path, required=True)
    parser.add_argument("--qmsum", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--python", required=True, help="version of that standard library")
    arguments = parser.parse_args()
    hotpotqa = sorted(read(arguments.hotpotqa), key=by_hash)
    half = len(hotpotqa) // 2
    write("hotpotqa_profile", hotpotqa[:half])
    write("hotpotqa_validation", hotpotqa[half:])
    write("2wikimqa", sorted(read(arguments.two_wiki)[TRAINED_ON:], key=by_hash)[:OTHER_RECORDS])
    write("musique", sorted(read(arguments.musique), key=by_hash)[:OTHER_RECORDS])
    write("qmsum", read(arguments.qmsum))
    write("stdlib_code", sorted(code_records(arguments.stdlib, arguments.python), key=by_hash)[:CODE_RECORDS])


def by_hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(record["id"].encode()).hexdigest()


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(name: str, records: Iterable[dict[str, Any]]) -> None:
    chosen = sorted(({field: record[field] for field in FIELDS} for record in records), key=lambda r: r["id"])
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen)
    (OUT / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
    print(f"{name}: {len(chosen)} records, {len(text.encode())} bytes")


def code_records(stdlib: Path, version: str) -> Iterator[dict[str, Any]]:
    """Yields at most one record per module of a package: a prefix of the file, and the line that follows it.

    Top-level modules are left out: the demo pair's sender was trained on them.
    """
    for path in sorted(stdlib.rglob("*.py")):
        module = path.relative_to(stdlib)
        if len(module.parts) < 2 or SKIPPED_PACKAGES & set(module.parts):
            continue
        text = path.read_text(encoding="utf-8")
        cuts = code_lines(text)
        if not cuts:
            continue
        number = cuts[int(hashlib.sha256(module.as_posix().encode()).hexdigest(), 16) % len(cuts)]
        lines = text.splitlines(keepends=True)
        yield {
            "id": f"stdlib-{module.with_suffix('').as_posix().replace('/', '.')}-{number + 1}",
            "context": "".join(lines[:number]),
            "question": "",
            "answers": [lines[number].rstrip()],
            "source": f"CPython {version}: Lib/{module.as_posix()}",
            "licence": "PSF-2.0",
        }


def code_lines(text: str) -> list[int]:
    """Returns the 0-based lines that can be asked for: they start a statement, none stands in a string or a comment."""
    try:
        ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return []
    starts, fresh = set(), True
    for token in tokens:
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT):
            continue
        if fresh and token.type not in (tokenize.STRING, tokenize.ENDMARKER):
            starts.add(token.start[0] - 1)
        fresh = token.type == tokenize.NEWLINE
    lines, position, chosen = text.splitlines(keepends=True), 0, []
    if len(lines) != text.count("\n") + (not text.endswith("\n")):
        return []  # form feeds and the like: lines would be counted differently by others
    for number, line in enumerate(lines):
        # LongBench's scorer skips output lines with these signs, so no answer may hold them.
        plain = not any(sign in line for sign in ("`", "#", "//"))
        fits = ANSWER_CHARS[0] <= len(line.strip()) <= ANSWER_CHARS[1]
        if number in starts and plain and fits and PREFIX_CHARS[0] <= position <= PREFIX_CHARS[1]:
            chosen.append(number)
        position += len(line)
    return chosen


if __name__ == "__main__":
    main()
