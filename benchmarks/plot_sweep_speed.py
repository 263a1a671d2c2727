"""Draws how the engine's time grows with layers and with context length, from results of `sweep_speed.py`.

python benchmarks/plot_sweep_speed.py benchmarks/results/sweep_speed*.json -o docs/sweep_speed.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    cases = [case for path in options.results for case in json.loads(path.read_text("utf-8"))["cases"]]
    cases.sort(key=lambda case: case["context_tokens"])
    with matplotlib.rc_context({"svg.hashsalt": "kvprofile", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for tokens in sorted({case["context_tokens"] for case in cases}):
            own = [case["starts_seconds"] for case in cases if case["context_tokens"] == tokens]
            # From start 1 on: start 0 is the receiver's own prefill. All passes of a model of so many layers.
            seconds = np.median(own, axis=0)[1:]
            layers = np.arange(1, len(seconds) + 1)
            together = np.cumsum(seconds[::-1])
            fit = np.sum(together * layers**2) / np.sum(layers.astype(float) ** 4)
            (line,) = left.plot(layers, together, ".", label=f"{tokens} tokens")
            left.plot(layers, fit * layers**2, color=line.get_color(), linewidth=0.8)
        left.set(
            xlabel="starts L (from the last layer on)", ylabel="all their passes, s", title="Dots measured, lines c·L²"
        )
        for answer in sorted({case["answer_tokens"] for case in cases}):
            own = [case for case in cases if case["answer_tokens"] == answer]
            lengths = np.array([case["context_tokens"] for case in own])
            times = np.array([statistics.median(case["engine_seconds"]) for case in own])
            slope, offset = np.polyfit(lengths, times, 1)
            (line,) = right.plot(lengths, times, "o", label=f"{answer}-token answers")
            right.plot(lengths, offset + slope * lengths, color=line.get_color(), linewidth=0.8)
        right.set(xlabel="context, tokens", ylabel="all 465 groups, s", title="Dots measured, lines fitted")
        right.set_ylim(0)
        for axes in (left, right):
            axes.legend(frameon=False)
        figure.savefig(options.output, metadata={"Date": None})
    print(options.output)


if __name__ == "__main__":
    main()
