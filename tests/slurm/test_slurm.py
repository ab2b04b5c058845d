"""A real Slurm: the sbatch script of the docs, and Cordee on nodes that it asks Slurm for; no bit or step is lost."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import UP_S, Cluster, missing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "examples" / "08_sbatch.sh"
STEPS = 80
LIMIT_S = 10 * UP_S
# The script asks for 2 nodes of 8 GPUs; these options of sbatch make it a small job. Its own lines stay as they are.
SMALL = ("--ntasks-per-node=1", "--gpus-per-node=1", "--mem=0", "--output=out.txt")

needs_slurm = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not in `tmp_path`: slurmstepd's sockets are in its spool, and the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        yield made
        made.close()


class Training:
    """One run of the tests' training script, as its user submits it."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: str, *options: str, hold: int | None = None) -> None:
        folder.mkdir()
        self.cluster, self.folder = cluster, folder
        self._write(*[] if hold is None else ["--hold", f"0:{hold}"])
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.id = cluster.submit(*SMALL, f"--nodelist={nodes}", *options, str(SCRIPT), "train.py", cwd=folder, **env)

    def _write(self, *more: str) -> None:
        script = HERE.parent / "train" / "job_script.py"
        argv = ["train.py", "--out", ".", "--steps", str(STEPS), *more]
        lines = ["import runpy, sys", f"sys.argv = {argv!r}", f"runpy.run_path({str(script)!r}, run_name='__main__')"]
        (self.folder / "train.py").write_text("\n".join(lines))

    @property
    def output(self) -> str:
        path = self.folder / "out.txt"
        return path.read_text() if path.exists() else ""

    def steps(self, rank: int) -> list[int]:
        path = self.folder / f"steps{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def told(self, name: str) -> str:
        return self.cluster.job(self.id).get(name, "")

    def until(self, name: str, value: str) -> None:
        self.cluster.until(lambda: self.told(name) == value, f"{name}={value}\n{self.output}", LIMIT_S)

    def until_step(self, step: int) -> None:
        self.cluster.until(lambda: step in self.steps(0), f"step {step}\n{self.output}", LIMIT_S)

    def until_requeued(self) -> None:
        """It is held back for two minutes then; whoever may update a job need not wait for that.

        Two seconds later: what revokes an attempt's credential knows whole seconds only, and would revoke the next.
        """
        self.until("Restarts", "1")
        self.until("JobState", "PENDING")
        self._write()
        self.cluster.ask("scontrol", "update", f"JobId={self.id}", "StartTime=now+2", "TimeLimit=30")

    def end(self, rank: int) -> dict[str, Any]:
        end: dict[str, Any] = json.loads((self.folder / f"end{rank}.json").read_text())
        return end


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The same training, which nobody interrupts."""
    found = Training(cluster, tmp_path_factory.mktemp("whole") / "out", "127.0.0.[1-2]", "--time=30")
    found.until("JobState", "COMPLETED")
    return found


def take(cluster: Cluster, nodes: str, folder: Path) -> str:
    """Have Slurm preempt what runs on these nodes; return the id of the job that gets them."""
    options = ("--partition=high", f"--nodelist={nodes}", "--exclusive", "--time=30", "--wrap=sleep 600")
    return cluster.submit(*options, cwd=folder)


def test_the_page_shows_the_script_that_is_tested() -> None:
    page = (ROOT / "docs" / "how-to" / "sbatch.md").read_text()
    assert textwrap.indent(SCRIPT.read_text(), "    ") in page


@pytest.mark.slurm
@needs_slurm
def test_the_script_of_the_docs_survives_preemption_and_the_time_limit(
    cluster: Cluster, whole: Training, tmp_path: Path
) -> None:
    limited = Training(cluster, tmp_path / "limited", "127.0.0.[1-2]", "--time=30", hold=10)
    pushed = Training(cluster, tmp_path / "pushed", "127.0.0.[3-4]", "--time=30", hold=10)
    pushed.until_step(10)
    owner = take(cluster, "127.0.0.[3-4]", tmp_path)
    limited.until_step(10)
    # A minute is the shortest limit. Slurm looks at limits every 30 s, so the signal comes at its next look.
    cluster.ask("scontrol", "update", f"JobId={limited.id}", "TimeLimit=1")
    for each in (pushed, limited):
        each.until_requeued()
        assert "its checkpoint is durable" in each.output and "Exited with exit code 75" in each.output
        if each is pushed:
            cluster.ask("scancel", owner)
    for each in (pushed, limited):
        each.until("JobState", "COMPLETED")
        assert each.told("Restarts") == "1"
        for rank in range(2):
            assert each.steps(rank) == list(range(STEPS)), "a step was repeated or left out"
            for name in ("weights", "at", "seen"):
                assert each.end(rank)[name] == whole.end(rank)[name], f"{name} of rank {rank}"
            losses = each.end(rank)["losses"]
            assert 0 < len(losses) < STEPS and losses == whole.end(rank)["losses"][-len(losses) :]


class Rendered(Training):
    """The same training, by the script that `cordee render slurm` makes of a job file."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: str, *options: str, hold: int | None = None) -> None:
        folder.mkdir()
        self.cluster, self.folder = cluster, folder
        self._write(*[] if hold is None else ["--hold", f"0:{hold}"])
        job = {
            "name": "rendered",
            "run": [sys.executable, "train.py"],
            "gpus": 2,
            "launch": "rank",
            "checkpoint": {"to": "checkpoints"},
            "limit": {"time": "30m"},
        }
        spec, script = folder / "job.yaml", folder / "job.sh"
        spec.write_text(json.dumps(job))
        words = ["render", "slurm", str(spec), "--gpus-per-node", "1", "--partition", "low", "-o", str(script)]
        words += [f"--sbatch={each}" for each in ("--output=out.txt", f"--nodelist={nodes}", *options)]
        subprocess.run([sys.executable, "-m", "cordee", *words], env=cluster.env, check=True, timeout=LIMIT_S)
        tested = cluster.run("sbatch", "--test-only", str(script), cwd=folder)
        assert tested.returncode == 0 and "to start at" in tested.stderr, tested.stderr
        self.id = cluster.submit(str(script), cwd=folder)


@pytest.mark.slurm
@needs_slurm
def test_a_rendered_job_is_requeued_after_a_preemption_and_not_after_scancel(
    cluster: Cluster, whole: Training, tmp_path: Path
) -> None:
    preempted = Rendered(cluster, tmp_path / "preempted", "127.0.0.[1-2]", hold=10)
    cancelled = Rendered(cluster, tmp_path / "cancelled", "127.0.0.[3-4]", hold=10)
    preempted.until_step(10)
    owner = take(cluster, "127.0.0.[1-2]", tmp_path)
    preempted.until_requeued()
    cluster.ask("scancel", owner)
    assert "its checkpoint is durable" in preempted.output and "Exited with exit code 75" in preempted.output
    cancelled.until_step(3)
    cluster.ask("scancel", cancelled.id)
    preempted.until("JobState", "COMPLETED")
    cluster.until(lambda: "its checkpoint is durable" in cancelled.output, "the save of the cancelled job", LIMIT_S)
    cluster.until(lambda: not cluster.ask("squeue", "-h", "-j", cancelled.id), "its end", LIMIT_S)
    assert cancelled.told("JobState") == "CANCELLED" and cancelled.told("Restarts") == "0"
    for rank in range(2):
        assert preempted.steps(rank) == list(range(STEPS)), "a step was repeated or left out"
        assert preempted.end(rank)["weights"] == whole.end(rank)["weights"], f"weights of rank {rank}"


@pytest.mark.slurm
@needs_slurm
def test_one_failed_rank_ends_a_rendered_gang(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n"
    )
    spec = tmp_path / "job.yaml"
    spec.write_text(json.dumps({"run": f"cd . && {sys.executable} train.py", "gpus": 2}))
    words = ["render", "slurm", str(spec), "--gpus-per-node", "1", "--sbatch=--output=out.txt", "-o", "job.sh"]
    subprocess.run([sys.executable, "-m", "cordee", *words], cwd=tmp_path, check=True, timeout=LIMIT_S)
    job = cluster.submit("job.sh", cwd=tmp_path)
    cluster.until(lambda: cluster.job(job)["JobState"] == "FAILED", "the job's end", LIMIT_S)
    assert "task 1 left with exit code 3: the gang ends" in (tmp_path / "out.txt").read_text()
    assert cluster.job(job)["Restarts"] == "0"


class OnSlurm:
    """Cordee on the nodes of a partition, as a user without root runs it: by its command line."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self._env = {
            **cluster.env,
            "CORDEE_HOME": str(folder / "home"),
            "TMPDIR": str(folder / "node"),
            "COLUMNS": "200",
        }
        (folder / "node").mkdir()

    def cordee(self, *words: str) -> str:
        argv = [sys.executable, "-m", "cordee", *words]
        done = subprocess.run(
            argv, env=self._env, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.said()}"
        return done.stdout

    def run(self, name: str, *words: str) -> Path:
        """Submit a gang of two nodes; return its folder."""
        out = self.folder / name
        out.mkdir()
        job = {
            "name": name,
            "run": words,
            "gpus": 2,
            "launch": "rank",
            "tier": "preemptible",
            "checkpoint": {"to": str(out / "checkpoint"), "every": "5s"},
            "env": {"OMP_NUM_THREADS": "1"},
        }
        spec = self.folder / f"{name}.yaml"
        spec.write_text(json.dumps(job))
        self.cordee("run", str(spec))
        return out

    def train(self, name: str, *, hold: int) -> Path:
        """Submit the tests' training script, which waits in a step for its notice."""
        script = str(HERE.parent / "train" / "job_script.py")
        out = str(self.folder / name)
        return self.run(name, sys.executable, script, "--out", out, "--steps", str(STEPS), "--hold", f"0:{hold}")

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.cordee("nodes", "--json"))
        return found

    def allocations(self) -> list[str]:
        """Return the nodes of the engine's batch jobs that run."""
        return [line.split()[1] for line in self.cluster.ask("squeue", "-h", "-t", "R", "-o", "%j %N").splitlines()
                if line.startswith("cordee-")]  # fmt: skip

    def ended(self, out: Path) -> bool:
        return all((out / f"end{rank}.json").exists() for rank in range(2))

    def said(self) -> str:
        logs = [*(self.folder / "home").glob("server.log"), *(self.folder / "home" / "slurm").glob("*.log")]
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in logs)


@pytest.fixture
def on_slurm(cluster: Cluster) -> Iterator[OnSlurm]:
    with tempfile.TemporaryDirectory(prefix="on-slurm-", ignore_cleanup_errors=True) as folder:
        made = OnSlurm(cluster, Path(folder))
        yield made
        subprocess.run(
            [sys.executable, "-m", "cordee", "down", "--yes"], env=made._env, check=False, capture_output=True
        )


@pytest.mark.slurm
@pytest.mark.timeout(1500)
@needs_slurm
def test_a_gang_moves_on_when_slurm_takes_a_node_and_idle_nodes_go_back(
    cluster: Cluster, whole: Training, on_slurm: OnSlurm
) -> None:
    on_slurm.cordee("up", "--on", "slurm", "--partition", "low", "--nodes", "3", "--slots", "1", "--idle", "2s",
                    "--listen", "127.0.0.1:0")  # fmt: skip
    assert len(on_slurm.nodes()) == 1, "one node tells what nodes are like; it may have gone back already"

    moved = on_slurm.train("moved", hold=12)
    cluster.until(lambda: (moved / "steps1").exists() and len((moved / "steps1").read_text().split()) > 10,
                  "step 10 on two nodes", LIMIT_S, on_slurm.said)  # fmt: skip
    taken = on_slurm.allocations()[-1]
    # Slurm's own preemption: SIGTERM to the agent's step, which reports it, and its ranks save.
    owner = take(cluster, taken, on_slurm.folder)
    cluster.until(lambda: cluster.job(owner).get("JobState") == "RUNNING", "the owner runs", LIMIT_S, on_slurm.said)
    cluster.until(lambda: on_slurm.ended(moved), "the job's end", LIMIT_S, on_slurm.said)
    cluster.ask("scancel", owner)
    for rank in range(2):
        assert [int(step) for step in (moved / f"steps{rank}").read_text().split()] == list(range(STEPS))
        assert json.loads((moved / f"end{rank}.json").read_text())["weights"] == whole.end(rank)["weights"]
    assert any(taken == node["name"] for node in on_slurm.nodes())

    cluster.until(lambda: not on_slurm.allocations(), "idle nodes given back", LIMIT_S, on_slurm.said)
    again = on_slurm.run("again", "sh", "-c", f"touch {on_slurm.folder}/again/end$RANK.json")
    cluster.until(lambda: on_slurm.ended(again), "nodes asked for again", LIMIT_S, on_slurm.said)
    on_slurm.cordee("down", "--yes")
    cluster.until(lambda: not on_slurm.allocations(), "nothing left in Slurm", LIMIT_S, on_slurm.said)
