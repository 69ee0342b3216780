#!/usr/bin/env python3
"""How what a step costs above its compute grows with parameter groups, their bytes and ranks.

    bench/scale.py PATH_OF_FSDP2 [--ranks 1 2 4 8] [--groups 4 8 16 32 64 96] [--bytes 1024 65536 1048576]
                   [--steps 20] [--repeats 1] [--json FILE] [--svg FILE]

Runs `fsdp2 bench scale` on each number of ranks of this host, --repeats times in turn, and takes medians. One table for each size of a
group: microseconds a step above the same plain layers on as many ranks, and of that a group's part. "growth" is the exponent
in groups: 1 is in proportion, more is worse, and a figure above 1.15 is marked. --svg writes a plot, by default
docs/plots/scale.svg; --from FILE takes the figures of an earlier --json instead of running.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import plots

PLOTS = Path(__file__).resolve().parent.parent / "docs" / "plots"
MARKED = 1.15


def rows_of(options, ranks):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [options.fsdp2, "run", "-n", str(ranks), "--", options.fsdp2, "bench", "scale", "--groups",
                   ",".join(map(str, options.groups)), "--bytes", ",".join(map(str, options.bytes)), "--steps",
                   str(options.steps), "--json", str(report)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}")
        return json.loads(report.read_text())["rows"]


def measure(options):
    """{"bytes,groups,ranks": [a row a run]}, each row as `fsdp2 bench scale` writes it."""
    runs = {}
    for _ in range(options.repeats):
        for ranks in options.ranks:
            for row in rows_of(options, ranks):
                runs.setdefault((row["bytes"], row["groups"], ranks), []).append(row)
    return [{**rows[0], **{key: statistics.median(row[key] for row in rows)
                           for key in ("plain_us", "sharded_us", "overhead_us", "group_us")}}
            for rows in runs.values()]


def growth(points):
    """The exponent of y in x, by least squares over logarithms; None where it means nothing."""
    points = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def size_name(count):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def by_size(rows):
    """[(bytes, {ranks: [(groups, overhead_us)]})], in order."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["bytes"], row["ranks"], row["groups"])):
        found.setdefault(row["bytes"], {}).setdefault(row["ranks"], []).append((row["groups"], row["overhead_us"]))
    return list(found.items())


def print_tables(rows):
    for size, series in by_size(rows):
        ranks = list(series)
        print(f"{size_name(size)} of parameters a group; us a step above compute (us a group)")
        print("  groups" + "".join(f"{f'{count} ranks' if count > 1 else '1 rank':>22}" for count in ranks))
        values = {count: dict(points) for count, points in series.items()}
        for groups in sorted({groups for points in values.values() for groups in points}):
            cells = ["" if groups not in values[count] else
                     f"{values[count][groups]:.0f} ({values[count][groups] / groups:.1f})" for count in ranks]
            print(f"  {groups:6}" + "".join(f"{cell:>22}" for cell in cells))
        exponents = [growth(series[count]) for count in ranks]
        cells = ["" if exponent is None else f"{exponent:.2f}{' !' if exponent > MARKED else ''}"
                 for exponent in exponents]
        print("  growth" + "".join(f"{cell:>22}" for cell in cells) + "\n")


def plot(rows):
    panels = [(f"{size_name(size)} a group",
               {f"{count} ranks" if count > 1 else "1 rank": points for count, points in series.items()})
              for size, series in by_size(rows)]
    return plots.lines("What a step costs above its compute", "parameter groups", "us a step", panels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fsdp2", nargs="?")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32, 64, 96])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1024, 65536, 1048576])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--svg", default=str(PLOTS / "scale.svg"))
    parser.add_argument("--from", dest="source")
    options = parser.parse_args()
    if not options.source and not options.fsdp2:
        parser.error("the path of fsdp2, or --from, is needed")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = json.loads(Path(options.source).read_text())["rows"] if options.source else measure(options)
    print_tables(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    svg = Path(options.svg)
    svg.parent.mkdir(parents=True, exist_ok=True)
    svg.write_text(plot(rows))


if __name__ == "__main__":
    main()
