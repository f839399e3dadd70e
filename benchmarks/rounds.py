"""Results of programs that run in turn: written after each result, with ratios within a round."""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any


class Rounds:
    """Timed rounds of one workload, which are added to those already in `file`."""

    def __init__(self, file: Path | None, name: str, workload: Any) -> None:
        self.file, self.workload = file, workload
        self.report: dict[str, Any] = {
            "workload": name,
            "tokens": workload.tokens,
            "flops": workload.flops,
            "runs": [],
        }
        if file is not None and file.exists():
            self.report = json.loads(file.read_text("utf-8"))
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.report["runs"].append({"rows": self.rows})

    def describe(self, **facts: str) -> None:
        """Records device and versions of this run."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self.report["runs"][-1] |= {"date": date, **facts}

    def add(self, arm: str, row: dict[str, Any]) -> None:
        """Adds the result of one program in the current round, and prints it."""
        self.rows.setdefault(arm, []).append(row)
        print(f"{self.report['workload']} {arm}: {json.dumps(row)}", flush=True)

    def write(self) -> None:
        """Writes the file, so that an interrupted run keeps its results."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        half_written = self.file.with_name(self.file.name + ".tmp")
        self.report["summary"] = self.summary("hand")
        half_written.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        os.replace(half_written, self.file)

    def summary(self, base: str) -> dict[str, Any]:
        """Returns for each program its speed, and the rates relative to `base` and to bf16.

        A ratio within one run is the median of the ratios of its rounds. PyTorch runs in other
        processes, whose medians are divided.
        """
        rows: dict[str, list[dict[str, Any]]] = {}
        for run in self.report["runs"]:
            for arm, added in run["rows"].items():
                rows.setdefault(arm, []).extend(added)
        return {arm: self._summary_of(arm, rows, base) for arm in rows}

    def _summary_of(self, arm: str, rows: dict[str, list[Any]], base: str) -> dict[str, Any]:
        done = [row for row in rows[arm] if "seconds" in row]
        if not done:
            return rows[arm][-1]  # {"failed": reason} or {"skipped": reason}
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
        return result

    def _ratios(self, arm: str, base: str) -> list[float]:
        """Returns the speed of `arm` over that of `base`, in each round in which both ran."""
        ratios, of_arm, of_base = [], [], []
        for run in self.report["runs"]:
            own, other = run["rows"].get(arm, []), run["rows"].get(base, [])
            pairs = zip(own, other, strict=False)
            ratios += [
                b["seconds"] / a["seconds"] for a, b in pairs if "seconds" in a and "seconds" in b
            ]
            of_arm += [row["seconds"] for row in own if "seconds" in row]
            of_base += [row["seconds"] for row in other if "seconds" in row]
        if not ratios and of_arm and of_base:
            ratios = [statistics.median(of_base) / statistics.median(of_arm)]
        return ratios
