"""A throw-away Slurm on this machine: munge, a controller and four nodes; their key, ports and state are their own."""

import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
UP_S, END_S = 30.0, 20.0
NODES = 4
# A node's name is an address of the loopback: `scontrol show hostnames` then gives what a rank can connect to.
_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SchedulerParameters=sched_interval=1
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=1000 Gres=gpu:8
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}]
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=110
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why no Slurm can be started here."""
    if os.geteuid() != 0:
        return "a Slurm of our own can only be started by root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return f"not on PATH: {', '.join(absent)}" if absent else None


class Cluster:
    """Runs from its making to `close`; everything it writes is in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._tick = threading.Event()
        for name in ("munge", "state", "spool", "gpus"):
            (folder / name).mkdir(parents=True)
        port = _free_ports(1 + NODES)
        names = {"folder": folder, "host": socket.gethostname().split(".")[0], "nodes": NODES}
        # The script takes a job's port from its id: a second cluster on the machine has other ids, so other ports.
        conf = _CONF.format(**names, port=port, first=port + 1, last=port + NODES, job=port + 5000)
        (folder / "slurm.conf").write_text(conf)
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpus/nvidia[0-7]\n")
        for number in range(8):
            os.mknod(folder / "gpus" / f"nvidia{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # another /dev/null
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
        self.env = {**outside, "SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        files = [f"--{name}={munge / name.split('-')[0]}" for name in ("key-file", "pid-file", "log-file", "seed-file")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self.until((munge / "socket").exists, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            self._daemon("slurmd", "-D", "-N", f"127.0.0.{number}")
        self.until(lambda: self.ask("sinfo", "-h", "-p", "low", "-o", "%t %D") == f"idle {NODES}", "four idle nodes")

    def _daemon(self, *argv: str) -> None:
        with (self.folder / f"{argv[0]}.{len(self._daemons)}.log").open("wb") as log:
            daemon = subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._daemons.append(daemon)

    def ask(self, *argv: str) -> str:
        """What a client's command writes; empty where it fails."""
        return self.run(*argv, cwd=self.folder).stdout.strip()

    def submit(self, *argv: str, cwd: Path, **extra: str) -> str:
        """The id of a new batch job."""
        done = self.run("sbatch", "--parsable", *argv, cwd=cwd, **extra)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, *argv: str, cwd: Path, **extra: str) -> "subprocess.CompletedProcess[str]":
        """Run a client's command to its end."""
        env = {**self.env, **extra}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.partition("=")[::2] for word in words)

    def until(
        self, true: Callable[[], bool], what: str, limit_s: float = UP_S, said: Callable[[], str] = lambda: ""
    ) -> None:
        """Return when it is true; where that takes too long, `said` is asked then."""
        end_s = time.monotonic() + limit_s
        while not true():
            assert all(daemon.poll() is None for daemon in self._daemons), f"a daemon has ended\n{self.told()}"
            assert time.monotonic() < end_s, f"{what}: not within {limit_s:.0f} s\n{said()}\n{self.told()}"
            self._tick.wait(0.05)

    def told(self) -> str:
        """The last lines of each daemon, and the queue."""
        tails = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([*tails, self.ask("squeue")])

    def close(self) -> None:
        """End its jobs, then its daemons, the youngest first; nobody else's."""
        if len(self._daemons) > 1:
            self.ask("scancel", "--user=root", "--signal=KILL", "--full")
            self.ask("scancel", "--user=root")
            end_s = time.monotonic() + END_S
            while self.ask("squeue", "-h") and time.monotonic() < end_s:
                self._tick.wait(0.05)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(END_S)
        self._daemons = []


def _free_ports(count: int) -> int:
    """The first of so many ports that nobody listens on."""
    for first in range(17100 + os.getpid() % 500 * 10, 31000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + number))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise OSError("no free ports for a Slurm")
