"""Results of programs that run in turn: written after each result, with ratios within a round."""

import json
import statistics
from pathlib import Path
from typing import Any

from gpu_record import gpu_state, key_of, write_json


class Rounds:
    """Timed rounds of one workload, which are added to those already in `file`.

    Rows of an earlier run are pooled with the others only if they were measured on the same device
    and with the same versions as those of the last run, and if the package of the program, if it
    has one, has the same version. Each row has the number of its round, and the state of the GPU
    directly after it.
    """

    def __init__(
        self, file: Path | None, name: str, workload: Any, environment: dict[str, Any]
    ) -> None:
        self.file, self.workload = file, workload
        self.report: dict[str, Any] = {
            "workload": name,
            "tokens": workload.tokens,
            "flops": workload.flops,
            "runs": [],
        }
        if file is not None and file.exists():
            self.report = json.loads(file.read_text("utf-8"))
        self.earlier = len(self.report["runs"])
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.report["runs"].append({"environment": environment, "rows": self.rows})

    def add(self, arm: str, row: dict[str, Any]) -> None:
        """Adds the result of one program in its next round, and prints it."""
        rows = self.rows.setdefault(arm, [])
        state = {"gpu": gpu_state()} if "seconds" in row else {}
        rows.append({**row, "round": len(rows), **state})
        print(f"{self.report['workload']} {arm}: {json.dumps(rows[-1])}", flush=True)

    def write(self) -> None:
        """Writes the file, so that an interrupted run keeps its results."""
        self.report["summary"] = self.summary("hand")
        write_json(self.file, self.report)

    def summary(self, base: str) -> dict[str, Any]:
        """Returns for each program its speed, and the rates relative to `base` and to bf16.

        A ratio within one run is the median of the ratios of its rounds, with their range. For
        programs of different runs, such as those of PyTorch, the medians are divided.
        """
        arms = dict.fromkeys(arm for run in self._pooled() for arm in run["rows"])
        return {arm: self._summary_of(arm, base) for arm in arms}

    def _pooled(self) -> list[dict[str, Any]]:
        runs = self.report["runs"]
        last = key_of(runs[-1]["environment"])
        return [run for run in runs if key_of(run["environment"]) == last]

    def _rows_of(self, arm: str) -> list[list[dict[str, Any]]]:
        """Returns the rows of a program in each run, those of the last version of its package."""
        runs = [run["rows"].get(arm, []) for run in self._pooled()]
        timed = [row for rows in runs for row in rows if "seconds" in row]
        version = timed[-1].get("package") if timed else None
        return [
            [row for row in rows if "seconds" in row and row.get("package") == version]
            for rows in runs
        ]

    def _summary_of(self, arm: str, base: str) -> dict[str, Any]:
        done = [row for rows in self._rows_of(arm) for row in rows]
        if not done:
            rows = [row for run in self._pooled() for row in run["rows"].get(arm, [])]
            return {name: rows[-1][name] for name in ("failed", "skipped") if name in rows[-1]}
        seconds = statistics.median(row["seconds"] for row in done)
        result: dict[str, Any] = {
            "rounds": len(done),
            "milliseconds": round(1e3 * seconds, 3),
            "range": [round(1e3 * pick(row["seconds"] for row in done), 3) for pick in (min, max)],
            "tokens_per_second": round(self.report["tokens"] / seconds),
            "tflops": round(self.report["flops"] / seconds / 1e12, 1),
            "first_loss": done[0]["losses"][0],
        }
        for other in (base, "jaxmp-bf16"):
            ratios = self._ratios(arm, other)
            if ratios:
                result[f"rate_over_{other}"] = round(statistics.median(ratios), 4)
            if len(ratios) > 1:
                # For n ratios, it contains the true median with probability 1 - 2 / 2**n.
                bounds = min(ratios), max(ratios)
                result[f"range_over_{other}"] = [round(bound, 4) for bound in bounds]
        return result

    def _ratios(self, arm: str, base: str) -> list[float]:
        """Returns the speed of `arm` over that of `base`, in each round in which both ran."""
        own, other = self._rows_of(arm), self._rows_of(base)
        ratios = []
        for rows, bases in zip(own, other, strict=True):
            of_round = {row["round"]: row["seconds"] for row in bases}
            ratios += [
                of_round[row["round"]] / row["seconds"] for row in rows if row["round"] in of_round
            ]
        of_arm = [row["seconds"] for rows in own for row in rows]
        of_base = [row["seconds"] for rows in other for row in rows]
        if not ratios and of_arm and of_base:
            ratios = [statistics.median(of_base) / statistics.median(of_arm)]
        return ratios
